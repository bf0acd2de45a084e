"""The server: thin routes over the store, the blobs, the archive of logs and the controller.

app          create_app: the routes and what stands before them
services     what the routes work with
security     token, Host, Origin, headers, body caps: before any route
bodies       what may be sent        answers     how errors and numbers leave
views        rows as docs/api.md shows them
follow       logs as they are written
startup      taking the home: lock, token, log, server.json
backup       a copy of the home while it is used
redact       tokens and secrets never reach the log
"""
