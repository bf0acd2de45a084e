"""The end of a program in a process that was kept warm: everything that Python does, except the teardown of the interpreter.

Threads of native libraries (gloo's among them) can outlive the program. One that asks for the interpreter's lock during the
teardown aborts the process, and a training that has done its work would count as failed. So the process leaves with `_exit`
once the work of the program is done: threads joined, exit handlers run, objects released, files flushed.

What a library registers with the C library's `atexit` does not run. Standard library only, and no more of it than needed.
"""

from __future__ import annotations

import _thread
import atexit
import gc
import io
import os
import signal
import sys
from types import ModuleType
from typing import Any, Callable, NoReturn

INTERRUPTED = -int(signal.SIGINT)
"""The status of a program that KeyboardInterrupt ended."""
FLUSH_FAILED = 120
"""Python's exit code where its standard output could not be written."""
FLUSH_WITHIN = 5.0
"""Seconds to flush the files that the program left open. A thread that still runs may hold the lock of one."""


def status_of(exc: BaseException, frames: int) -> int:
    """Report the exception that ended the program, as Python does; the exit status.

    `frames`: number of frames at the start of a traceback that do not belong to the program.
    """
    if isinstance(exc, SystemExit):
        return _exit_status(exc)
    trace: Any = exc.__traceback__
    for _ in range(frames):
        trace = None if trace is None else trace.tb_next
    exc = exc.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(exc), exc, trace
    if sys.version_info >= (3, 12):
        setattr(sys, "last_exc", exc)  # noqa: B010 - not in Python 3.9
    hook = getattr(sys, "excepthook", sys.__excepthook__)
    try:
        hook(type(exc), exc, trace)
    except SystemExit as leaving:
        return _exit_status(leaving)
    except BaseException as wrong:  # noqa: BLE001 - a hook may raise anything; Python prints both
        _print("Error in sys.excepthook:")
        _display(wrong)
        _print("\nOriginal exception was:")
        sys.__excepthook__(type(exc), exc, trace)
    return INTERRUPTED if isinstance(exc, KeyboardInterrupt) else 1


def leave(status: int) -> NoReturn:
    """Finish the program and end the process. The caller must not refer to any object of the program."""
    try:
        threading: Any = sys.modules.get("threading")
        if threading is not None:
            _run_reporting(threading._shutdown, threading)
        _quietly(atexit._run_exitfuncs)  # prints what a handler raises
        flushed = _flush_standard(report=True)
        _quietly(_release_program)
        flushed = _flush_standard(report=flushed) and flushed
        _quietly(_flush_in_time)
        if status == INTERRUPTED:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        elif not flushed:
            status = FLUSH_FAILED
    finally:
        os._exit(status & 0xFF)


def _exit_status(exc: SystemExit) -> int:
    if exc.code is None:
        return 0
    if isinstance(exc.code, int):
        return exc.code if -(1 << 63) <= exc.code < 1 << 63 else -1
    _print(exc.code)
    return 1


def _flush_standard(report: bool) -> bool:
    """Whether standard output and standard error could be flushed."""
    flushed = True
    for name in ("stdout", "stderr"):
        file: Any = getattr(sys, name, None)
        try:
            if file is not None and not getattr(file, "closed", False):
                file.flush()
        except BaseException as exc:  # noqa: BLE001 - a program may put any object there
            flushed = False
            if report and name == "stdout":
                _report_ignored(exc, file)
    return flushed


def _release_program() -> None:
    """Release the program's module, so that its archives and temporary files are closed by their destructors.

    An object that a thread or a library still uses remains, and the names of the module with it.
    """
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    sys.modules["__main__"] = ModuleType("__main__")
    gc.collect()


def _flush_in_time() -> None:
    """Flush files in a thread: one that cannot be flushed must not keep the process from ending."""
    done = _thread.allocate_lock()
    done.acquire()

    def work() -> None:
        try:
            _flush_files()
        finally:
            done.release()

    _thread.start_new_thread(work, ())
    done.acquire(timeout=FLUSH_WITHIN)


def _flush_files() -> None:
    for kind in (io.TextIOWrapper, (io.BufferedWriter, io.BufferedRandom)):
        for found in gc.get_objects():
            if issubclass(type(found), kind):
                _quietly(found.flush)  # a closed file raises
    _quietly(_flush_c_files)


def _flush_c_files() -> None:
    import ctypes  # not every Python has it

    ctypes.CDLL(None).fflush(None)


def _quietly(step: Callable[[], object]) -> None:
    try:
        step()
    except BaseException:  # noqa: BLE001 - code of the program runs in these: whatever it raises, the next step is due
        pass


def _run_reporting(step: Callable[[], object], owner: object) -> None:
    try:
        step()
    except BaseException as exc:  # noqa: BLE001 - as above; Python says this of the threads it waits for
        _report_ignored(exc, owner)


def _report_ignored(exc: BaseException, owner: object) -> None:
    _quietly(lambda: _print(f"Exception ignored in: {owner!r}"))
    _display(exc)


def _display(exc: BaseException) -> None:
    trace = exc.__traceback__ and exc.__traceback__.tb_next  # without the frame of this module
    _quietly(lambda: sys.__excepthook__(type(exc), exc.with_traceback(trace), trace))


def _print(what: object) -> None:
    _quietly(lambda: sys.stderr.write(f"{what}\n"))
