"""The archived logs.

reader  LogArchive and LogWriter: read and write the archived segments
lines   lines of one task, or of several tasks ordered by time
"""
