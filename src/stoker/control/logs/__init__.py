"""The archived logs.

writer  LogWriter: copies the log of a task into the archive
reader  LogArchive: reads the archive
lines   lines of one task, or of several tasks ordered by time
"""
