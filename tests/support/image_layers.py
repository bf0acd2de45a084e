from __future__ import annotations

from stoker.images.layers import LayerTree


def sample() -> LayerTree:
    tree = LayerTree()
    tree.file("usr/bin/run", b"#!/bin/sh\n", 0o755)
    tree.file("etc/b", "text")
    tree.file("etc/a", b"\0" * 2000)
    tree.link("bin", "usr/bin")
    tree.directory("tmp", 0o1777)
    tree.directory("home/app", 0o700, owner=1000)
    tree.file("long/" + "n" * 200, "long names")
    tree.file("umlaut/\u00fc", "names beyond ASCII")
    return tree
