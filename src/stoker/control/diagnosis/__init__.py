"""Answers about runs. Nothing here changes anything.

why        why a run waits or failed, and what to do about it; pure
readiness  how many of a run's tasks are up
straggler  which task holds the others up; pure
speedup    how fast a run goes, and what each further worker brought; pure
dry_run    what a submit would start; pure
"""
