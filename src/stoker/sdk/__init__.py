"""What training code may import. Standard library only."""
