"""Stoker trains your `train.py`, here or on a cluster.

Training code may `import stoker` and use `report`, `checkpoint`, `params` and `should_stop`; everything
works, doing nothing, when the script runs outside Stoker. Nothing is imported until it is used. The rooms, from the
bottom up:

errors       every error that a user may see
linux/       what Linux offers and Python does not
disks        file systems: full or read-only
settings     where a home keeps things, and the settings of an operator
spec/        what users ask for: the job file
task/        the task directory: the contract between the server and a task
blobs/       content-addressed storage
launcher/    runs a task's training processes
sdk/         what training code may import
courier/     serves a task directory in a pod
transfer/    the server's side of moving trees
engine/      starts, stops and observes tasks
frameworks/  the environment and command of each task, by framework
images/      registries, and images without a daemon
search/      hyperparameter search
scheduling/  the queue
client/      the HTTP client
store/       the database
control/     the control loop
server/      the HTTP server
cli/         the command line
testing/     conformance suites and fakes
"""

from __future__ import annotations

TYPE_CHECKING = False  # not from typing: importing that doubles the time of `stoker --help`
if TYPE_CHECKING:
    from typing import Any

    from stoker.sdk import checkpoint, jax_initialize, params, report, should_stop

__version__ = "0.1.0"
__all__ = ["__version__", "checkpoint", "jax_initialize", "params", "report", "should_stop"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        return getattr(importlib.import_module("stoker.sdk"), name)
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")
