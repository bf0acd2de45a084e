"""Frameworks: given the world, each task's environment and command. Pure. The distributed issue fills this room."""
