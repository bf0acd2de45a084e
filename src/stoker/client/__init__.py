"""The HTTP client used by the command line and by people's own code.

http       one small HTTP/1.1 connection; standard library, loads in a few milliseconds
api        Client: one method per route of docs/api.md
frames     many files out of one response
local      find or start the user's own server
tree       the working folder as a tree, with a cache of hashes
ignore     which files of a working folder are not shipped
ship       send what the server does not have
unshipped  whether a run died of a file that was not shipped
record     what ran: git, Python, host, environment

Importing this package loads `api` and `http` only; the rest is imported where it is used.
"""

from stoker.client.api import Client

__all__ = ["Client"]
