"""How images are made of Debian packages and Python wheels, by an ordinary user and without a daemon.

debian    packages of a lock file: fetched, verified, unpacked into a Tree
python    locked wheels, and bytecode made by the image's own interpreter
stoker    Stoker's image
"""
