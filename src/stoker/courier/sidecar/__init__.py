"""The courier in a pod: serves one task directory to the server, beside the container that trains.

    __main__    flags, signals, the end
    server      connections: who may speak, how many at once
    http        the little of HTTP that is needed
    verbs       what may be asked
    sync        what is new, and waiting for it
    staging     content that arrives
    placing     making directories of it
    trees       reading manifests
    pages       listing a directory with hashes, a page at a time
    settle      after a launcher's death
    jobs        work that outlasts a request
    buffers     the few big ones, lent
    trash       removing what belongs to somebody else

Its memory is small (it is limited to less than 100 MB) and so is its share of a processor. It may be killed at any
moment and knows nothing afterwards that the directory does not say. Everything it is asked may be asked again.
Standard library only, Python 3.9: it is copied into other people's images.
"""
