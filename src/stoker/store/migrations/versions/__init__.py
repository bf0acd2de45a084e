"""One file per version, named by its number. Never changed once released."""
