"""The control loop: observe, decide, record, act.

controller      what the server calls, from any thread: submit, stop, resume, why
submission      what becomes of a submission: understood, fitting, recorded; and what one would send
clusters        clusters: added, changed, removed
loop            ControlLoop: sessions, the wake-ups of each run, ticks; runs in a thread of its own
runs/           one step of a run: reads its tasks, records, stops, restarts, ends
startup/        an attempt from the recorded intent to its orders; taking over after a restart
diagnosis/      read-only answers: why, readiness, stragglers, speed-up, dry runs
placement/      queue and engines: who starts where, elastic runs, what engines show
context         what the parts of control share, and the Wakeups protocol
state           LiveRun and LiveTask: state in memory
fleet           the engines by name, and what a job asks of their nodes
checkpoints/    checkpoints of several tasks, and which are kept
ingest/         what task directories say becomes rows, lines and blobs
policy/         pure decisions: outcomes, phases of tasks, what follows a failure
logs/           the logs that are kept for good
committer       group commit: what several runs record goes into common transactions
notifier        wakes followers of a run
maintenance     backups, and the deletion of blobs that nothing refers to
run_secrets     the secrets of runs, on disk
image_metadata  what a job's image says of itself, read at submit

The rule of every step: what was decided is recorded in one transaction before anything is done about it, and
everything done can be done again. So the loop may die at any moment; the next one starts from the database.
Imports go from the top of this list to its bottom (a contract in pyproject.toml). The states of runs and the phases
of tasks are in docs/state-machine.md.
"""
