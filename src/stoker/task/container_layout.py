"""Stoker's code inside the container of a user's image: the paths, and how a Python is found there.

The code comes as a bundle (stoker/launcher/bundle.py): a zip that Python runs as it is,

    python3 -I -S bundle.zip VERB ...

    init TASK_JSON DIRECTORY BIN   make the task directory, unpack the bundle to BIN/DIGEST (and link BIN/current);
         [PART]                    make the task's part of a shared volume too
    courier ...                    the sidecar
    launch DIRECTORY               the launcher; ends, with 0, when it is released or its lease has run out
    collect DIRECTORY GENERATION   settle the directory of a dead launcher
    shell DIRECTORY [COMMAND ...]  a shell (or a command), started like the body

`init`, `courier` and `collect` can run from the zip itself; `launch` and `shell` need it unpacked.
"""

from __future__ import annotations

from typing import List, Optional

TASK = "/stoker/task"
"""The task directory itself."""
BIN = "/stoker/bin"
"""Where `init` unpacks the bundle; read-only for the body."""
CURRENT = f"{BIN}/current"
"""The unpacked bundle, whatever its digest. With Stoker's own image it is the bundle of that image, not of the server."""
BUNDLE = "/stoker/bundle/bundle.zip"
"""The zip, when it comes from a ConfigMap."""
IMAGE_BUNDLE = "/opt/stoker/bundle.zip"
"""The zip in Stoker's own image."""
SETUPS = "/stoker/setup"
HOME = "/stoker/home"
SECRETS = "/stoker/secrets"
KEY = "/stoker/key"
SHARED = "/stoker/shared"
"""The volume for checkpoints that the tasks of one server share. For `init` and the courier only."""

NO_PYTHON = 127
"""Exit code of a container that has no Python for the launcher."""

_OLDEST = "import sys; sys.exit(sys.version_info < (3, 9))"
_PLACES = (
    "python3 python python3.14 python3.13 python3.12 python3.11 python3.10 python3.9"
    " /usr/local/bin/python3 /usr/bin/python3 /opt/conda/bin/python3 /opt/venv/bin/python3"
)
_FIND = f"""\
for p in {_PLACES}; do
  command -v "$p" >/dev/null 2>&1 && "$p" -I -S -c '{_OLDEST}' >/dev/null 2>&1 && exec "$p" -I -S "$@"
done
m="no Python 3.9 or newer in this image (PATH is $PATH)"
echo "stoker: $m" >&2
[ -w /dev/termination-log ] && echo "$m" >/dev/termination-log
exit {NO_PYTHON}
"""


def command(program: str, verb: str, *arguments: str, python: Optional[str] = None) -> List[str]:
    """The command line for a container: the bundle `program` with this verb, run by the first suitable Python.

    `python`: the one to use, for images without a shell or with a Python at an unusual path.
    """
    if python:
        return [python, "-I", "-S", program, verb, *arguments]
    return ["/bin/sh", "-c", _FIND, "stoker", program, verb, *arguments]
