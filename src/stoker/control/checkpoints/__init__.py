"""Checkpoints of a run, made from what its tasks committed.

assembly    merges the parts of several tasks into one tree and one row
completion  decides when a checkpoint of several tasks is complete; pure
retention   decides which checkpoints are kept; pure
"""
