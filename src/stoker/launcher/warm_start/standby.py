"""A main process that forks a standby process before its program starts, so that the next generation need not import torch
again.

    python [OPTIONS] BUNDLE warm DESCRIPTOR LAUNCHER MODULES PROGRAM...

The process imports MODULES (`torch`: seconds), forks the standby process, and then behaves as `python [OPTIONS] PROGRAM...`.
The standby process is a child of the launcher and has only DESCRIPTOR open. When the process before it has been started or has
ended, it reports `ready`, forks the next standby process, and waits for a message: the environment, the output and the
directory of the next generation. Then it runs the program. No code of the program has run in it before. Each copy is forked in
advance, because a fork takes the longer the more was imported. (`pool` is the launcher's side.)

This runs in the training's own Python: standard library only, and as few modules as possible.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import warnings
from typing import Any, Dict, List, NoReturn, Optional, Tuple

from stoker.launcher.warm_start import program_exit
from stoker.launcher.warm_start.env_check import sets_environment

HEADER_BYTES = 8
"""Bytes before a message, which hold its length."""
OWN_FRAMES = 2
"""Frames of this module at the start of a traceback of the program."""
FORK_DELAY = 1.0
"""Seconds by which a fork is delayed, while the process before starts its program."""
ADOPTION_TIMEOUT = 5.0
"""Seconds within which the kernel must have made the launcher the parent of a standby process."""


def main(argv: List[str]) -> NoReturn:
    descriptor, launcher, modules, program = int(argv[0]), int(argv[1]), argv[2].split(","), argv[3:]
    link = socket.socket(fileno=descriptor)
    link.set_inheritable(False)
    if not sets_environment(program) and _import_modules(modules):
        _fork_standbys(link, launcher)
    link.close()
    _become(program)


def _import_modules(modules: List[str]) -> bool:
    """Import them; whether the first one could be. Not every version has the others."""
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException:  # noqa: BLE001 - the program imports it too, and reports the error itself
            return name != modules[0]
    return True


# -- standby processes -------------------------------------------------------------------------------------------


def _fork_standbys(link: socket.socket, launcher: int) -> None:
    """Returns in the process that is to run the program: first in this one, later in one standby process after the other."""
    copy = False
    while True:
        turn, hold = os.pipe()
        if not _fork_standby(launcher):
            break
        copy = True
        os.close(hold)
        _report(link, "later")
        os.read(turn, 1)  # returns when the process before starts its program, or is dead
        os.close(turn)
        _report(link, "ready")
        select.select([link], [], [], FORK_DELAY)
    os.close(turn)
    if copy:
        _wait_for_order(link)
    os.close(hold)


def _fork_standby(launcher: int) -> bool:
    """Fork; True in the copy. The copy is a child of the launcher, not of this process: a program that waits for all its
    children must not find it."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about threads of libraries: these handle a fork themselves
        try:
            between = os.fork()
        except OSError:
            return False
        if between:
            os.waitpid(between, 0)
            return False
        try:
            copy = os.fork()
        except OSError:
            os._exit(1)
        if copy:
            os._exit(0)
    _detach(launcher)
    return True


def _detach(launcher: int) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(null, target)
    os.close(null)
    deadline = time.monotonic() + ADOPTION_TIMEOUT
    while os.getppid() != launcher:
        if time.monotonic() > deadline:
            os._exit(0)
        time.sleep(0.001)
    if launcher != 1:
        _die_with(launcher)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()  # as in a new process; `random` does so by itself


def _die_with(launcher: int) -> None:
    """Die with the launcher, as every body does."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        os._exit(0)
    if os.getppid() != launcher:
        os._exit(0)


def _wait_for_order(link: socket.socket) -> None:
    """Wait for the message of the launcher and apply it. Exits when the launcher is dead."""
    try:
        message, descriptors = _receive(link)
    except (OSError, ValueError, EOFError):
        os._exit(0)
    for at, fd in enumerate(descriptors):
        os.dup2(fd, at + 1)
        os.close(fd)
    os.environ.clear()
    os.environ.update(message["env"])
    os.chdir(message["directory"])


def _report(link: socket.socket, word: str) -> None:
    try:
        link.sendall(f"{word} {os.getpid()}\n".encode())
    except OSError:
        os._exit(0)


def _receive(link: socket.socket) -> Tuple[Dict[str, Any], List[int]]:
    import array

    room = socket.CMSG_SPACE(2 * array.array("i").itemsize)
    head, more, _, _ = link.recvmsg(HEADER_BYTES, room)
    found = array.array("i")
    for _, _, data in more:
        found.frombytes(data[: len(data) - len(data) % found.itemsize])
    while head and len(head) < HEADER_BYTES:
        head += link.recv(HEADER_BYTES - len(head))
    left, parts = int(head or b"0"), []
    while left:
        part = link.recv(min(left, 1 << 16))
        if not part:
            break
        left -= len(part)
        parts.append(part)
    if not head or left:
        raise EOFError
    return json.loads(b"".join(parts)), list(found)


# -- the program -------------------------------------------------------------------------------------------------


def _become(program: List[str]) -> NoReturn:
    """Run the program as Python does: it sees no module of Stoker, and its tracebacks have no frame of this module."""
    for name in [name for name in sys.modules if name == "stoker" or name.startswith("stoker.")]:
        del sys.modules[name]
    words: List[str] = getattr(sys, "orig_argv", [])  # from Python 3.10 on
    if sys.argv[0] in words:
        words[words.index(sys.argv[0]) :] = program
    try:
        if program[0] == "-m":
            _run_module(program[1:])
        else:
            _run_script(program)
    except BaseException as exc:  # noqa: BLE001 - whatever ends it is reported as Python reports it
        failure: Optional[BaseException] = exc
    else:
        failure = None
    # Not in the handler: a hook of the program would find the exception there, and its own would refer to it.
    status = 0 if failure is None else program_exit.status_of(failure, OWN_FRAMES)
    del failure  # it refers to what the program's module holds
    program_exit.leave(status)


def _run_script(program: List[str]) -> None:
    import builtins
    from importlib.machinery import SourceFileLoader
    from types import ModuleType

    path = os.path.join(os.getcwd(), program[0])
    sys.argv = list(program)
    _first_on_path(os.path.dirname(os.path.realpath(path)))
    module = ModuleType("__main__")
    module.__dict__.update(
        __file__=path, __builtins__=builtins, __loader__=SourceFileLoader("__main__", path), __cached__=None
    )
    sys.modules["__main__"] = module
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as exc:
        print(
            f"{sys.executable}: can't open file {path!r}: [Errno {exc.errno}] {exc.strerror}", file=sys.stderr
        )
        sys.exit(2)
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - this is the program


def _run_module(program: List[str]) -> None:
    import runpy
    from types import ModuleType

    sys.argv = ["-m", *program[1:]]
    _first_on_path(os.getcwd())
    sys.modules["__main__"] = ModuleType("__main__")
    runpy._run_module_as_main(program[0])  # type: ignore[attr-defined] # what `python -m` calls


def _first_on_path(place: str) -> None:
    """Put the program's folder in the place of the bundle."""
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    else:
        sys.path[0] = place
