"""`stoker doctor`."""

COMMANDS = {}
