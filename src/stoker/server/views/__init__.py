"""Rows as docs/api.md shows them.

runs         runs, attempts, checkpoints, events
attempts     an attempt of several tasks: who is there, and the state of its world
performance  stragglers, speed, speed-up
"""
