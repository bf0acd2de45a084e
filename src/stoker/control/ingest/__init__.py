"""What task directories say becomes rows, lines and blobs. User code can write there: nothing is believed unchecked.

journal_reader       JournalReader: status, journal, metrics, logs and checkpoints of one task
checkpoint_transfer  large checkpoints, on threads of their own
validation           types and bounds of what a task says
redaction            secrets are taken out of what tasks say
refusals             checkpoints that are not offered, as warnings of their run
tampering            what a run made of files in its task directory that are not its own; pure
step_rate            how fast a task goes, from the steps it reports; pure
installed_packages   what a run's Python had installed
"""
