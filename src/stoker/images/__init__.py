"""Registries and images: reading what an image says of itself, and making images without a daemon.

reference   names of images
registry    Registry: config, account, push
session     requests about one repository
wire        redirects, caps and vetted addresses
connection  one connection to a vetted host
auth        passwords and tokens
logins      config.json, credential helpers
rules       which hosts may be spoken to
manifest    the documents of an image
accounts    the numbers behind USER
tarscan     finds small files in a stream of tar
layers      layers that are the same bytes for the same tree
build       images out of layers
pushing     sends an image

Everything is synchronous: call it from a worker thread.
"""

from stoker.images.logins import Logins
from stoker.images.registry import Registry
from stoker.images.rules import HostRules

__all__ = ["HostRules", "Logins", "Registry"]
