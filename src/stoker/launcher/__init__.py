"""The launcher: the small process that runs a task's training processes and keeps its directory.

    __main__, launcher    one launcher on one directory: orders in, journal and status out (recording)
    running, body, tree   one body: starting it, stopping it, ending everything beneath it
    endings               how it ended, and why
    logs, framing         its output, within a budget
    sample, limits, gpu   what it uses, and what happens at its limits
    setups, makeenv       `setup:`, once per content
    checkpoints, scan*, staging, verify*   what it wrote, and what of that can be trusted
    forkserver, starting, guardian         many launchers, quickly, each ended with its whole tree
    collect               after a launcher's death
    container, lease      in somebody else's container: its limits, its environment, how long without contact
    outside               a body that is a container of its own
    shell                 a person in a task's place
    bundle, verbs         a portable copy of all this, of the SDK and of the courier, and what it can be asked
    preparing             making a task directory in a pod

Standard library only, Python 3.9: this package is copied into other people's images.
"""
