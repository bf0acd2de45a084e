"""The logs that are kept for good.

reader  LogArchive and LogWriter: the kept segments, written and read
lines   lines of one task, or of several in the order of their times
"""
