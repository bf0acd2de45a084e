"""The task directory: the one contract between Stoker and training processes.

Everything between the server and a task goes through files in its directory: the order to start, the
environment, logs, metrics, samples, checkpoints, the exit status. The launcher (same machine as the
processes) writes its side, the server (or, in a pod, the courier on its behalf) writes the other. The files are
still there after any of them has died.

layout            the names of the files
formats           what is inside the files, and how they are written so that a crash never tears them
checkpoint_names  what names in a checkpoint directory mean
directory         TaskDir: access to a task directory, on this machine or in a pod
local_directory   a task directory on this machine, read and written by the server
safe_open         opens files beneath a directory that user code owns
fencing           when a body may start, a record counts and a lost task is replaced
courier_protocol  what goes between the server and a courier in a pod
container_layout  where Stoker's code lies in a user's container
units             sizes in messages

Standard library only, Python 3.9: this package is copied into other people's images.
"""
