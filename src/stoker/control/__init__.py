"""The loops: observe, decide, record, act.

    controller   what the server calls, from any thread: submit, stop, resume, why...
    loop         the one loop that owns all live runs; runs in its own thread
    launch       bringing an attempt up: engine, code, checkpoint, secrets, order
    pump         taking in what a task directory holds: status, journal, metrics, logs
    redaction    secrets are taken out of what tasks say
    gathering    pure: when a checkpoint that several tasks write is complete
    assembly     from their parts to one tree and one row
    ending       pure: from how a body ended to a cause, and from a cause to what becomes of the run
    orders       pure: a job and its place -> the order for the launcher
    retention    pure: which checkpoints are kept
    archive      the logs that are kept for good
    why          pure: one paragraph about waiting or failure
    hub          waking those who wait for a run to change

The rule of every pass: what was decided is recorded in one transaction before anything is done about it, and
everything done can be done again. So the loop may die at any moment; the next one starts from the database.
"""
