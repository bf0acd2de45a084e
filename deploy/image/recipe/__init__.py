"""Makes images from Debian packages and Python wheels, without root and without a daemon.

debian    packages of a lock file: fetched, verified, unpacked into a Tree
python    locked wheels, and bytecode made by the image's own interpreter
stoker    Stoker's image
"""
