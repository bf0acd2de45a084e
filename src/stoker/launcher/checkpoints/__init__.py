"""Finding finished checkpoints while training goes on.

scanner          Scanner: what is committed, by its signals
candidate        one checkpoint, and the rules about when it may be complete; pure
snapshot         the files of a checkpoint and their states
directory_watch  inotify on the checkpoint directory
open_files       whether a process has a file open for writing
sdk_commits      what the SDK declared complete
stager           copies a checkpoint aside
scan_state       what was seen, for the next scanner
"""
