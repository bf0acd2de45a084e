"""One module per command (or small group). Each has `COMMANDS`: name -> declaration."""
