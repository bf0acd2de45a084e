"""The verbs of a bundle: `python -I -S BUNDLE VERB ...` (see stoker/task/container_layout.py).

Every verb imports only what it needs: in a container each of them is a process of its own, and its start-up time counts.
"""

from __future__ import annotations

import signal
import sys
from typing import Callable, Dict, List

USAGE = """\
usage: python -I -S BUNDLE VERB ...
  init TASK_JSON DIRECTORY BIN [PART]
  courier ...
  launch DIRECTORY
  collect DIRECTORY GENERATION
  shell DIRECTORY [COMMAND ...]
  warm DESCRIPTOR LAUNCHER MODULES PROGRAM ...
"""
BAD_USAGE = 64


def main(argv: List[str]) -> int:
    verb = _VERBS.get(argv[0]) if argv else None
    if verb is None:
        sys.stderr.write(USAGE)
        return BAD_USAGE
    try:
        return verb(argv[1:])
    except _Wrong:
        sys.stderr.write(USAGE)
        return BAD_USAGE


class _Wrong(Exception):
    """The arguments are not those of the verb."""


def _init(argv: List[str]) -> int:
    task, directory, place, part = _exactly(argv if len(argv) == 4 else [*argv, ""], 4)
    from stoker.launcher import task_init

    return task_init.main(task, directory, place, part)


def _courier(argv: List[str]) -> int:
    import runpy

    from stoker.launcher import bundle

    # Not imported by name: the package exports the SDK, which the launcher must not import.
    sys.modules["stoker"].__path__.insert(0, bundle.aside())
    sys.argv[1:] = argv
    runpy.run_module("stoker.courier", run_name="__main__", alter_sys=True)
    return 0


def _launch(argv: List[str]) -> int:
    (directory,) = _exactly(argv, 1)
    # A signal to the init of a container is lost while it has no handler. Blocked, it is delivered later.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    from stoker.launcher import __main__ as launcher

    return launcher.main([directory, "--container"])


def _collect(argv: List[str]) -> int:
    directory, generation = _exactly(argv, 2)
    if not generation.isdigit():
        raise _Wrong
    from stoker.launcher.recovery import collect
    from stoker.task.directory import StillHeld

    try:
        collect(directory, int(generation))
    except (OSError, StillHeld) as exc:
        print(f"stoker collect: {exc}", file=sys.stderr)
        return 75
    return 0


def _shell(argv: List[str]) -> int:
    if not argv:
        raise _Wrong
    from stoker.launcher.process import shell

    return shell.enter(argv[0], argv[1:])


def _warm(argv: List[str]) -> int:
    if len(argv) < 4:
        raise _Wrong
    from stoker.launcher.warm_start import standby

    return standby.main(argv)


_VERBS: Dict[str, Callable[[List[str]], int]] = {
    "init": _init,
    "courier": _courier,
    "launch": _launch,
    "collect": _collect,
    "shell": _shell,
    "warm": _warm,
}


def _exactly(argv: List[str], count: int) -> List[str]:
    if len(argv) != count or argv[0].startswith("-"):
        raise _Wrong
    return argv
