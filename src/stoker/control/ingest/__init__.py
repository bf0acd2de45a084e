"""What task directories say becomes rows, lines and blobs. User code can write there: nothing is believed unchecked.

ingester             Ingester: one task: what its reader finds, and its checkpoints as they arrive
journal_reader       JournalReader: status, journal, metrics and logs of one task
checkpoint_transfer  CheckpointTransfers: threads that move checkpoints to the blobs
checkpoint_rows      rows of checkpoints from what a journal says; pure
validation           types and bounds of what a task says
redaction            secrets are taken out of what tasks say
refusals             checkpoints that are not offered, as warnings of their run
tampering            what a run made of files in its task directory that are not its own; pure
step_rate            how fast a task goes, from the steps it reports; pure
installed_packages   what a run's Python had installed
"""
