"""Checkpoints of a run, from what single tasks committed.

assembly    parts that several tasks committed become one tree and one row
completion  when a checkpoint of several tasks is complete; pure
retention   which checkpoints are kept; pure
"""
