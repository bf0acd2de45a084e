"""A program in a warm process ends like one started by Python: output, files, exit status."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from stoker.launcher import bundle

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux")

ENDS = {
    "at the last line": 'print("done")',
    "unflushed output": 'import sys\nsys.stdout.write("out")\nsys.stderr.write("err")',
    "exit handlers, last one first": """
        import atexit
        atexit.register(print, "first")
        atexit.register(print, "second")
        print("end")
        """,
    "an exit handler that fails": """
        import atexit
        def broken():
            raise ValueError("no")
        atexit.register(print, "still runs")
        atexit.register(broken)
        """,
    "threads go on": """
        import threading
        main_is_over = threading.main_thread().join
        threading.Thread(target=lambda: (main_is_over(), print("after the last line"))).start()
        print("last line")
        """,
    "a daemon thread does not": """
        import threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        print("last line")
        """,
    "an executor ends its work": """
        from concurrent.futures import ThreadPoolExecutor
        ThreadPoolExecutor(1).submit(print, "worked")
        """,
    "finalizers and temporary directories": """
        import os, tempfile, weakref
        class Kept: pass
        kept = Kept()
        weakref.finalize(kept, print, "finalized")
        kept.place = tempfile.TemporaryDirectory(dir=".")
        open(kept.place.name + "/file", "w").close()
        """,
    "processes of multiprocessing": """
        import multiprocessing, time
        context = multiprocessing.get_context("fork")
        context.Process(target=print, args=("child",)).start()
        context.Process(target=time.sleep, args=(600,), daemon=True).start()
        """,
    "a queue is emptied by its feeder": """
        import multiprocessing, os
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        def read():
            print(len(queue.get()))
        child = context.Process(target=read)
        child.start()
        queue.put("x" * (1 << 20))
        """,
    "a child of its own": """
        import atexit, os
        atexit.register(lambda: print("ends", flush=True))
        if os.fork():
            os.wait()
        """,
    "files that are still open": """
        import zipfile
        text = open("text", "w")
        text.write("whole")
        archive = zipfile.ZipFile("archive", "w")
        archive.writestr(zipfile.ZipInfo("name"), "content")
        """,
    "a temporary file": """
        import tempfile
        kept = tempfile.NamedTemporaryFile(dir=".")
        """,
    "a file that a module keeps": """
        import json, signal
        json.kept = open("text", "w")
        json.kept.write("whole")
        kept = open("more", "wb")
        kept.write(b"whole")
        def handler(*_): kept.flush()
        signal.signal(signal.SIGTERM, handler)
        """,
    "output of C": 'import ctypes\nctypes.CDLL(None).printf(b"from C\\n")',
    "a destructor prints": """
        class Kept:
            def __del__(self):
                print("released", other)
        other = "with its names"
        kept = Kept()
        """,
    "status": "raise SystemExit(7)",
    "large status": "raise SystemExit(258)",
    "negative status": "raise SystemExit(-1)",
    "true": "raise SystemExit(True)",
    "none": "import sys\nsys.exit()",
    "a message": 'import sys\nsys.exit("no more")',
    "a tuple": "import sys\nsys.exit((1, 2))",
    "status from an exit handler does not count": "import atexit, sys\natexit.register(lambda: sys.exit(5))",
    "an exception": 'import atexit\natexit.register(print, "handled")\n1 / 0',
    "an exception with a cause": 'try:\n  1 / 0\nexcept ZeroDivisionError as exc:\n  raise ValueError("no") from exc',
    "what failed is there for exit handlers": """
        import atexit, sys
        atexit.register(lambda: print(sys.last_type, sys.last_value))
        1 / 0
        """,
    "a hook": 'import sys\nsys.excepthook = lambda *_: print("hook")\n1 / 0',
    "a hook that exits": "import sys\nsys.excepthook = lambda *_: sys.exit(9)\n1 / 0",
    "a hook that fails": "import sys\ndef hook(*_):\n  raise ValueError('no')\nsys.excepthook = hook\n1 / 0",
    "interrupted": 'import atexit\natexit.register(print, "handled")\nraise KeyboardInterrupt',
    "interrupted while threads are joined": """
        import _thread, threading
        main = threading.main_thread()
        def work():
            main.join()
            _thread.interrupt_main()
        threading.Thread(target=work).start()
        """,
    "no standard output": "import sys\nsys.stdout = None",
    "closed standard output": "import sys\nsys.stdout.close()",
    "standard output that cannot be written": 'import os\nprint("lost")\nos.close(1)',
}

OF_VERSIONS = r"0x[0-9a-f]+|(?<=^Exception ignored ).*|: $|^[ ~^]+\n"
"""What differs from one Python, or one process, to the next."""


class Ended:
    def __init__(self, folder: Path, words: list[str], keep: tuple[int, ...] = ()) -> None:
        env = {"PATH": os.environ["PATH"]}
        ended = subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            pass_fds=keep,
            timeout=60,
        )
        self.code = ended.returncode
        self.out = ended.stdout
        self.err = re.sub(OF_VERSIONS, "", ended.stderr, flags=re.MULTILINE).replace(str(folder), "")
        self.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.folders = [
            path.name for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__"
        ]


def plain(folder: Path, *words: str) -> Ended:
    return Ended(folder, list(words))


def warm(folder: Path, code: str, *words: str) -> Ended:
    """The module to keep warm is missing: the process makes no copy of itself, and runs the program."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        own = [code, "warm", str(theirs.fileno()), str(os.getpid()), "not_a_module"]
        return Ended(folder, [*own, *words], (theirs.fileno(),))


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    return bundle.write(str(tmp_path_factory.mktemp("bundle")))


def folders(place: Path, text: str) -> list[Path]:
    made = [place / "plain", place / "warm"]
    for folder in made:
        folder.mkdir()
        (folder / "train.py").write_text(textwrap.dedent(text))
    return made


@pytest.mark.parametrize("text", ENDS.values(), ids=ENDS.keys())
def test_it_ends_as_python_does(tmp_path: Path, code: str, text: str) -> None:
    by_python, by_us = folders(tmp_path, text)
    wanted, found = plain(by_python, "train.py"), warm(by_us, code, "train.py")
    assert vars(found) == vars(wanted)


@pytest.mark.parametrize("end", ["a message", "an exception", "exit handlers, last one first", "interrupted"])
def test_a_module_ends_as_python_does(tmp_path: Path, code: str, end: str) -> None:
    by_python, by_us = folders(tmp_path, ENDS[end])
    wanted, found = plain(by_python, "-m", "train"), warm(by_us, code, "-m", "train")
    assert vars(found) == vars(wanted)


def test_an_exit_status_that_does_not_fit_into_c(tmp_path: Path, code: str) -> None:
    by_python, by_us = folders(tmp_path, "raise SystemExit(2**70)")
    assert plain(by_python, "train.py").code == warm(by_us, code, "train.py").code == 255


TEARDOWN = """
import atexit, json, os, sys, threading
class Native:
    def __del__(self, abort=os.abort, in_teardown=sys.is_finalizing):
        if in_teardown():
            abort()
atexit.register(print, "handled")
threading.Thread(target=print, args=("joined",)).start()
sys.stdout.write("done\\n")
"""


@pytest.mark.parametrize("owner", ["kept", "json.kept"])
def test_an_abort_in_the_teardown_of_the_interpreter_does_not_happen(
    tmp_path: Path, code: str, owner: str
) -> None:
    """With plain Python it does happen: threads of gloo sometimes abort like this."""
    by_python, by_us = folders(tmp_path, f"{TEARDOWN}{owner} = Native()\n")
    assert plain(by_python, "train.py").code == -signal.SIGABRT
    found = warm(by_us, code, "train.py")
    assert (found.code, found.err) == (0, "")
    assert sorted(found.out.split()) == ["done", "handled", "joined"]


def test_an_abort_of_the_program_itself_still_counts(tmp_path: Path, code: str) -> None:
    _, by_us = folders(tmp_path, "import atexit, os\natexit.register(os.abort)")
    assert warm(by_us, code, "train.py").code == -signal.SIGABRT


def test_a_file_whose_lock_is_held_does_not_keep_it_from_ending(tmp_path: Path, code: str) -> None:
    """A thread writes more into a pipe than fits, and nothing reads it."""
    text = """
    import os, select, threading
    reader, writer = os.pipe()
    stuck = open(writer, "wb")
    threading.Thread(target=lambda: stuck.write(bytes(1 << 20)), daemon=True).start()
    select.select([reader], [], [])
    """
    _, by_us = folders(tmp_path, text)
    found = warm(by_us, code, "train.py")
    assert (found.code, found.err) == (0, "")
