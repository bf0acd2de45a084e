"""The courier in a pod: serves one task directory to the server, beside the container that trains.

__main__       flags, signals, the end
server         connections: which peers may speak, how many at once
http           the little of HTTP that is needed
handlers       one function for each request
sync           what is new, and waiting for it
staging        content that arrives in pieces
placement      making a directory out of content that has arrived
manifest       reading manifests
listing        listing a directory with hashes, a page at a time
recovery       settling a task directory after its launcher's death
shared_volume  the checkpoint volume that tasks of several runs share
jobs           work that outlasts a request
buffers        a few large buffers, lent to requests
trash          removing files that belong to another user

Its memory is small (it is limited to less than 100 MB) and so is its share of a CPU. It may be killed at any
moment and knows nothing afterwards that the directory does not say. Every request may be repeated.
Standard library only, Python 3.9: it is copied into other people's images.
"""
