"""The Kubernetes API as Stoker uses it: plain dicts over HTTP, and one list-and-watch cache. Nothing else in
Stoker talks to an API server.

client       Kube: requests with the credentials of a KubeConfig
informer     Informer: a mirror of some kinds of objects, kept by list and watch; says when it cannot
kinds        the kinds by name
session      credentials, connections, bounded tries
streams      watches, logs, exec, port-forward
kubeconfig   which API server, with which credentials
credentials  tokens and certificates, as of now
exec_plugin  credentials from plugins
tls          whom to trust towards the API server
proxies      HTTP proxies, by the rules of curl and kubectl
errors       KubeError and KubeUnavailable

`client` and `session` load the HTTP library; commands that only look at a kubeconfig do not need it.
"""
