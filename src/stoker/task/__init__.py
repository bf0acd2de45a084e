"""The task directory: the one contract between Stoker and training processes.

Everything between the server and a task goes through files in its directory: the order to start, the
environment, logs, metrics, samples, checkpoints, the exit status. The launcher (same machine as the
processes) writes its side, the server (or, in a pod, the courier on its behalf) writes the other. Whoever
dies, the files are still there.

    layout      the names
    formats     what is inside the files, and how they are written so that a crash never tears them
    access      reaching a directory, near or far
    near        reading and writing a directory on this machine, trusting nothing that is in it
    beneath     opening and looking inside a directory that belongs to somebody else
    wire        what goes between the server and a courier in a pod

Standard library only, Python 3.9: this package is copied into other people's images.
"""
