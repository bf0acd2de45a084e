"""The command line. Heavy modules are imported by the command that needs them: `stoker --help` starts fast.

main           entry point: finds the command, runs it, turns errors into messages and exit codes
command_index  the commands by name, group and one line each
load           imports the module of one command
commands/      the commands
rendering/     everything that is printed
params         what a command takes, as data, and a quick parser
click_adapter  the same commands for click: help, mistakes, unusual spellings
context        what every command gets: where to print, how, and the client
errors         mistakes that only the command line can make
guess          suggestions for misspelt names
complete       shell completion
docs           docs/cli.md, from the commands
lookup         which run a name or the beginning of an id means
job_flags      the flags of `stoker run`, and the job they make
submit_flow    from a job to a run: ship the code, record what runs, submit once
import_files   foreign manifests: what is made of them is said before anything starts
watch_run      an attached run: its lines, its state, Ctrl-C, its exit code
stream         log records from the server, across restarts of the server
pull_plan      what `pull` is going to fetch
download       files from the server: resumed, verified, never outside the folder
checklist      findings with a mark and a fix: `doctor`, `cluster check`
database_move  a home from SQLite to PostgreSQL and back
new_database   an empty database for a home that lost its own
restore        a home back from a backup
"""
