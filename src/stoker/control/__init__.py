"""The control loop: observe, decide, record, act.

controller      what the server calls, from any thread: submit, stop, resume, why
submission      checks a submission and records it as a run; dry runs
clusters        adds, changes and removes clusters
loop            ControlLoop: sessions, wake-ups of runs, periodic work; runs in its own thread
runs/           one step of a run: reads its tasks, records, stops, restarts, ends
startup/        brings up a recorded attempt; adopts tasks after a restart
diagnosis/      read-only answers: why, readiness, stragglers, speed-up, dry runs
placement/      queue and engines: admission, elastic runs, observations
context         what the parts of control share, and the Wakeups protocol
state           LiveRun and LiveTask: state in memory
fleet           the engines by name, and what a job asks of their nodes
checkpoints/    checkpoints of several tasks, and which are kept
ingest/         turns the content of task directories into rows, log lines and blobs
policy/         pure decisions: outcomes, phases of tasks, what follows a failure
logs/           the archived logs
committer       group commit: changes of several runs share transactions
notifier        wakes followers of a run
maintenance     backups, and the deletion of blobs that nothing refers to
trash           deletes removed runs for good
disk_usage      what takes the room in a home
run_secrets     the secrets of runs, on disk
image_metadata  the configuration of a job's image, read at submit

The rule of every step: a decision is recorded in one transaction before anything acts on it, and every action can be
repeated. So the loop may die at any moment; the next one starts from the database. Imports go from the top of this
list to its bottom (a contract in pyproject.toml). The states of runs and the phases of tasks are in
docs/state-machine.md.
"""
