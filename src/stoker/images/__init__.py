"""Registries and images: reads the settings of images, and makes images without a daemon.

reference   names of images
registry    Registry: config, account, push
session     requests about one repository
wire        redirects, caps and vetted addresses
connection  one connection to a vetted host
auth        passwords and tokens
logins      config.json, credential helpers
rules       which hosts may be contacted
manifest    the documents of an image
accounts    the numbers behind USER
tarscan     finds small files in a stream of tar
layers      layers with equal bytes for equal trees
build       images from layers
pushing     sends an image

Everything is synchronous: call it from a worker thread.
"""

from stoker.images.logins import Logins
from stoker.images.registry import Registry
from stoker.images.rules import HostRules

__all__ = ["HostRules", "Logins", "Registry"]
