"""A main process that leaves a copy of itself before it begins, so that the next generation need not import all again.

    python [OPTIONS] BUNDLE warm DESCRIPTOR LAUNCHER MODULES PROGRAM...

The process imports MODULES (`torch`: seconds), leaves the copy and then is `python [OPTIONS] PROGRAM...` in every
respect that a program asks about. The copy belongs to the launcher and has nothing open but DESCRIPTOR. When it is its turn
it says so, leaves a copy too, and waits to be told to go: to become the program of the next generation, with that one's
environment, output and directory. Nothing of the program has run in it before. Copies are made ahead, because that takes
longer the more has been imported. (`spares` is the launcher's side.)

This runs in the training's own Python, whatever that is: standard library only, and no more of it than needed.
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

LENGTH = 8
"""Bytes before a message that say how long it is."""
OURS = 2
"""Frames of a traceback of the program that are of this module."""
AFTER = 1.0
"""Seconds that a process has to begin before the one that follows it copies itself."""
ADOPTED = 5.0
"""Seconds within which the kernel has given an orphan to the launcher."""


def main(argv: List[str]) -> NoReturn:
    descriptor, launcher, modules, program = int(argv[0]), int(argv[1]), argv[2].split(","), argv[3:]
    link = socket.socket(fileno=descriptor)
    link.set_inheritable(False)
    if not sets_environment(program) and _imported(modules):
        _leave_successor(link, launcher)
    link.close()
    _become(program)


def _imported(modules: List[str]) -> bool:
    """Whether the first of them is there. The others are parts that not every version has."""
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException:  # noqa: BLE001 - the program imports it as well, and says itself what is wrong
            return name != modules[0]
    return True


# -- leaving a copy, and being one -------------------------------------------------------------------------------


def _leave_successor(link: socket.socket, launcher: int) -> None:
    """Returns in whoever is to run the program now: at once in the first, then in one copy after the other."""
    copy = False
    while True:
        turn, hold = os.pipe()
        if not _leave_copy(launcher):
            break
        copy = True
        os.close(hold)
        _say(link, "later")
        os.read(turn, 1)  # ends when the one before goes, or is gone
        os.close(turn)
        _say(link, "ready")
        select.select([link], [], [], AFTER)
    os.close(turn)
    if copy:
        _wait(link)
    os.close(hold)


def _leave_copy(launcher: int) -> bool:
    """True in the copy. It is nobody's child but the launcher's: a program that waits for its children has none."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that libraries have threads: those that do so see to it themselves
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
    _settle(launcher)
    return True


def _settle(launcher: int) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(null, target)
    os.close(null)
    deadline = time.monotonic() + ADOPTED
    while os.getppid() != launcher:
        if time.monotonic() > deadline:
            os._exit(0)
        time.sleep(0.001)
    if launcher != 1:
        _die_with(launcher)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()  # another process would have begun elsewhere; `random` does so by itself


def _die_with(launcher: int) -> None:
    """As every body of this launcher."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        os._exit(0)
    if os.getppid() != launcher:
        os._exit(0)


def _wait(link: socket.socket) -> None:
    """Until it is told to go. When the launcher is gone it is gone too."""
    try:
        told, descriptors = _receive(link)
    except (OSError, ValueError, EOFError):
        os._exit(0)
    for at, fd in enumerate(descriptors):
        os.dup2(fd, at + 1)
        os.close(fd)
    os.environ.clear()
    os.environ.update(told["env"])
    os.chdir(told["directory"])


def _say(link: socket.socket, word: str) -> None:
    try:
        link.sendall(f"{word} {os.getpid()}\n".encode())
    except OSError:
        os._exit(0)


def _receive(link: socket.socket) -> Tuple[Dict[str, Any], List[int]]:
    import array

    room = socket.CMSG_SPACE(2 * array.array("i").itemsize)
    head, more, _, _ = link.recvmsg(LENGTH, room)
    found = array.array("i")
    for _, _, data in more:
        found.frombytes(data[: len(data) - len(data) % found.itemsize])
    while head and len(head) < LENGTH:
        head += link.recv(LENGTH - len(head))
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
    """Run it as Python would have: what it sees of us is gone, and what it fails with is its own."""
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
    status = 0 if failure is None else program_exit.status_of(failure, OURS)
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
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - it is what we are here for


def _run_module(program: List[str]) -> None:
    import runpy
    from types import ModuleType

    sys.argv = ["-m", *program[1:]]
    _first_on_path(os.getcwd())
    sys.modules["__main__"] = ModuleType("__main__")
    runpy._run_module_as_main(program[0])  # type: ignore[attr-defined] # what `python -m` calls


def _first_on_path(place: str) -> None:
    """Where ours was."""
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    else:
        sys.path[0] = place
