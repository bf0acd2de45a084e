"""Answers about runs. Nothing here changes a run.

why        why a run waits or failed, and what to do about it; pure
readiness  how many tasks of a run are up
straggler  which task slows the others down; pure
speedup    speed of a run, and its scaling against one worker; pure
dry_run    what a submit would start; pure
"""
