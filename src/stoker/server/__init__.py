"""The HTTP server: thin routes over the store, the blobs, the kept logs and the controller.

__main__     `python -m stoker.server`: the server of one home
startup      takes the home: lock, token, log, server.json
app          create_app: the routes and what stands before them
routes/      the routes, one file per noun
views/       rows as docs/api.md shows them
services     what the routes work with
security     token, Host, Origin, headers, body caps: before any route
requests     what may be sent
responses    how answers, errors and numbers leave
http_server  uvicorn, as this server uses it
connections  how many connections, and what each may cost
log_stream   logs as they are written
leadership   which of several servers on one database leads
clusters     makes the engines of clusters
config_file  changes one setting in config.toml
backup       a copy of the home while it is used
log_redaction  tokens and secrets never reach the server's log
"""
