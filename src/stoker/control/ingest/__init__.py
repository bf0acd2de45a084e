"""Takes in task directories as rows, lines and blobs. User code can write there, so everything is validated.

ingester             Ingester: takes in one task, with its checkpoints as they arrive
journal_reader       JournalReader: status, journal, metrics and logs of one task
checkpoint_transfer  CheckpointTransfers: threads that move checkpoints to the blobs
checkpoint_rows      rows of checkpoints from entries of the journal; pure
validation           types and bounds of values from a task
redaction            removes secrets from the output of tasks
folder_repairs       torn files of the working folder, in words; pure
refusals             refused checkpoints, as warnings of their run
tampering            files of the task directory that the run changed and must not
step_rate            seconds per step, from the steps a task reports; pure
installed_packages   packages of a run's Python
"""
