"""The launcher: the small process that runs a task's training processes and maintains its directory.

__main__      runs a launcher on a prepared task directory
launcher      Launcher: orders in, journal and status out
event_loop    signals, orders, pipes: what the launcher waits for
task_files    its lock, its identity, its JSON files
journal       what was done, so that nothing is done twice
records       journal and status in order, again when there was no room
lease         how long a task goes on without contact
process/      the body: started, stopped, ended with its whole tree
telemetry/    logs, usage, hangs
checkpoints/  finds finished checkpoints
folder/       puts torn files of the working folder back
verify/       whether a file's format proves that it is whole
warm_start/   standby processes for the next generation
forkserver/   starts launchers quickly; guardian
helpers/      programs for bodies: MPI's remote shell, Horovod, stacks
recovery      after a launcher's death: settles what it left
task_init     makes a task directory in a pod
entrypoints   what a bundle can be asked to do
bundle        a portable copy of this package, the SDK and the courier

Standard library only, Python 3.9: this package is copied into other people's images.
"""
