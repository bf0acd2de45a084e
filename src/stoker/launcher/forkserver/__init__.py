"""Launchers started in a millisecond, each ended with its whole tree.

server      the fork server
child       from the fork to the launcher
guardian    ends a task with its launcher where there are no PID namespaces
home_cover  hides the server's home from a launcher
"""
