"""The images that tests run in pods, made from Debian packages and locked wheels, and pushed to a registry.

    root         Python in /usr/bin, runs as root
    nonroot      USER app, by name; uid and gid 1000 are in its /etc/passwd
    conda        Python only in /opt/conda/bin, which is on the PATH of its ENV
    entrypoint   ENTRYPOINT without CMD, a script that trains; WORKDIR /app
    nopython     busybox and nothing else
    readonly     numeric USER and WORKDIR; meant to be run with a read-only root
    train        root, with numpy and scikit-learn
    openmpi      root, with Open MPI and the system libraries of the big frameworks
    stoker       Stoker's own

The cache is keyed by the images' inputs: the second time nothing is built, and only missing parts are
pushed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "deploy/image"))

from images.recipes import NAMES, PYTHON, build_test_images
from images.serve import LocalRegistry

__all__ = ["NAMES", "PYTHON", "LocalRegistry", "build_test_images"]
