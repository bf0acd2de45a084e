"""Standby processes for the next generation: the program's view of them, and their end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.launcher import bundle
from stoker.task import layout

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux")

Make = Callable[..., Any]
everywhere = pytest.mark.parametrize("mode", ["namespace", "user-namespace", "guardian"], indirect=True)

HEAVY = """
import os
with open(os.environ["STOKER_OUTPUT_DIR"] + "/imported", "a") as file:
    file.write("once\\n")
"""
LOOK = """
import json, os, sys, threading
main = sys.modules["__main__"]
said = {
    "argv": sys.argv,
    "options": getattr(sys, "orig_argv", [0])[1:],
    "first": sys.path[0],
    "file": __file__,
    "name": __name__,
    "package": __package__,
    "spec": __spec__ and __spec__.name,
    "main": main.__dict__ is globals(),
    "stoker": [name for name in sys.modules if name.partition(".")[0] == "stoker"],
    "where": os.getcwd(),
    "stdin": os.readlink("/proc/self/fd/0"),
    "open": sorted(os.listdir("/proc/self/fd"))[:-1],
    "threads": threading.active_count(),
    "session": os.getsid(0) == os.getpid(),
    "children": open("/proc/self/task/%d/children" % os.getpid()).read(),
    "rank": os.environ.get("RANK"),
}
print(json.dumps(said, sort_keys=True), flush=True)
"""


class Program:
    """A training with its code, in a task whose launcher has a bundle."""

    def __init__(self, it: Any, place: Path, python: str) -> None:
        self.it = it
        self.python = python
        self.made = bundle.write(str(place / "bundle"))
        self.code = it.root / layout.CODE
        self.code.mkdir(exist_ok=True)
        (self.code / "heavy.py").write_text(HEAVY)

    def write(self, text: str, name: str = "train.py") -> None:
        path = self.code / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def run(self, *words: str, generation: int, env: dict[str, str] | None = None, **more: Any) -> None:
        words = words or ("train.py", "--lr", "1")
        warm = {"python": [self.python, "-u"], "program": list(words), "modules": ["heavy"]}
        known = {"PYTHONPATH": str(self.code), "RANK": str(generation), **(env or {})}
        self.it.run(self.python, "-u", *words, generation=generation, env=known, warm=warm, **more)

    def imports(self) -> int:
        path = self.it.root / layout.OUTPUT / "imported"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def running(self, generation: int) -> int:
        """The body's pid in its launcher's records, once the body runs and its standby process waits."""
        self.it.said(f"running {generation}")
        deadline = time.monotonic() + 60
        while True:
            found = self._python()
            talking = [pid for pid, out in found.items() if out.startswith("pipe:")]
            if len(talking) == 1 and all(pid in talking or _waits(pid) for pid in found):
                return talking[0]
            assert time.monotonic() < deadline, f"not one body and copies that wait: {found}"
            time.sleep(0.01)

    def kill(self, generation: int) -> Any:
        os.kill(self.running(generation), signal.SIGKILL)
        return self.it.ending()

    def _python(self) -> dict[int, str]:
        """The Python processes of the body, and the stdout of each. The launcher reads a pipe."""
        found = {}
        for pid in self.it.processes():
            with contextlib.suppress(OSError):
                exe, out = (os.readlink(f"/proc/{pid}/{name}") for name in ("exe", "fd/1"))
                if Path(exe).name.startswith("python"):
                    found[pid] = out
        return found


def _waits(pid: int) -> bool:
    """Whether a standby process has reported that it is ready."""
    with contextlib.suppress(OSError):
        place = Path(f"/proc/{pid}/wchan").read_text()
        return any(word in place for word in ("pipe", "unix", "select", "poll"))
    return False


RUNNING = """
import heavy, os, time
print("running", os.environ["RANK"], flush=True)
time.sleep(600)
"""


@pytest.fixture
def program(mode: Any, task: Make, place: Path) -> Program:
    it = task()
    made = Program(it, place, mode.python)
    mode.options = ("--bundle", made.made)
    mode.start(it)
    return made


@everywhere
def test_the_next_generation_uses_the_standby_process(program: Program) -> None:
    program.write(RUNNING)
    for generation in (1, 2, 3):
        program.run(generation=generation)
        ending = program.kill(generation)
        assert (ending.kind, ending.signal) == ("signal", signal.SIGKILL)
    assert program.imports() == 1
    program.it.order("release", generation=3)
    program.it.nothing_left()


def test_the_program_sees_what_it_would_see(program: Program) -> None:
    """First and later generations, by path and as a module: the same as with Python itself."""
    program.write(LOOK)
    program.write("", "tools/__init__.py")
    program.write(LOOK + "raise SystemExit(0)", "tools/look.py")
    for words in (("train.py", "--lr", "1"), ("-m", "tools.look", "x")):
        plain = subprocess.run(
            [sys.executable, "-u", *words],
            cwd=program.code,
            env={"PYTHONPATH": str(program.code), "RANK": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            start_new_session=True,
            check=True,
        )
        wanted = json.loads(plain.stdout)
        first = program.it.seq + 1
        for generation in range(first, first + 20):
            before = program.imports()
            program.write(LOOK + "\nimport os; os.abort()" if generation % 2 else LOOK, words[0])
            program.run(*words, generation=generation)
            program.it.ending()
            said = json.loads(program.it.text().splitlines()[-1])
            assert said == {**wanted, "rank": str(generation)}
            # A body that ended before its standby process was ready leaves none, nor does one that succeeded.
            if generation > first and (program.imports() == before or words[0] == "-m"):
                break
        else:
            pytest.fail("no generation used a standby process")


@pytest.mark.parametrize(
    "program_text", ["1 / 0", "def broken(:", "import sys; sys.exit('no more')", "raise SystemExit(7)"]
)
def test_it_fails_as_it_would(program: Program, program_text: str) -> None:
    program.write(program_text)
    environ = {"PYTHONPATH": str(program.code)}
    plain = subprocess.run(
        [sys.executable, "train.py"],
        cwd=program.code,
        env=environ,
        capture_output=True,
        check=False,
        text=True,
    )
    for generation in (1, 2):
        program.run("train.py", generation=generation)
        ending = program.it.ending()
        assert (ending.kind, ending.code) == ("exit", plain.returncode)
    assert program.it.text("e") == 2 * plain.stderr
    assert program.imports() >= 1, "a body that ends at once may leave no standby process"


def test_a_module_fails_as_it_would(program: Program) -> None:
    program.write("1 / 0")
    environ = {"PYTHONPATH": str(program.code)}
    words = ["-m", "train"]
    plain = subprocess.run(
        [sys.executable, *words], cwd=program.code, env=environ, capture_output=True, check=False, text=True
    )
    program.run(*words, generation=1)
    assert program.it.ending().code == plain.returncode
    assert program.it.text("e") == plain.stderr


def test_a_missing_program_is_reported(program: Program) -> None:
    program.run("nowhere.py", generation=1)
    assert program.it.ending().code == 2
    assert "can't open file" in program.it.text("e")


@pytest.mark.parametrize(
    "text",
    [
        'import os\nos.environ["OMP_NUM_THREADS"] = "1"\n',
        'import os\nos.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")\n',
        "import os\nos.environ.update(dict())\n",
        "from settings import threads\n",
    ],
)
def test_what_sets_variables_is_started_anew(program: Program, text: str) -> None:
    program.write("import os\nname = 'OMP_NUM_THREADS'\nos.environ[name] = '1'\nthreads = 1\n", "settings.py")
    program.write(text + RUNNING)
    for generation in (1, 2):
        program.run(generation=generation)
        program.kill(generation)
    assert program.imports() == 2


def test_variables_of_the_world_may_be_set(program: Program) -> None:
    program.write('import os\nos.environ.setdefault("MASTER_ADDR", "localhost")\n' + RUNNING)
    for generation in (1, 2):
        program.run(generation=generation)
        program.kill(generation)
    assert program.imports() == 1


def test_with_another_environment_it_is_started_anew(program: Program) -> None:
    program.write(RUNNING)
    for generation in (1, 2):
        program.run(generation=generation, env={"OMP_NUM_THREADS": str(generation)})
        program.kill(generation)
    assert program.imports() == 2


@everywhere
def test_a_lost_standby_process_does_no_harm(program: Program) -> None:
    program.write(RUNNING)
    program.run(generation=1)
    program.it.said("running 1")
    for pid in program.it.processes():
        os.kill(pid, signal.SIGKILL)
    program.it.ending()
    program.run(generation=2)
    program.kill(2)
    assert program.imports() == 2


def test_an_abort_in_the_teardown_of_the_interpreter_is_not_the_end_of_the_program(program: Program) -> None:
    """Threads of gloo sometimes abort like this after the work is done."""
    program.write(
        """
        import atexit, heavy, os, sys, threading
        class Native:
            def __del__(self, abort=os.abort, in_teardown=sys.is_finalizing):
                if in_teardown():
                    abort()
        kept = Native()
        atexit.register(print, "saved by its exit handler")
        # One write for each line: print makes several, and those of two threads mix.
        threading.Thread(target=sys.stdout.write, args=("saved by its thread\\n",)).start()
        if os.path.exists("generation-2"):
            sys.exit(int(os.environ["RANK"]))
        open("generation-2", "w").close()
        sys.stdout.write(f"running {os.environ['RANK']}\\n")
        threading.Event().wait()
        """
    )
    program.run(generation=1)
    program.kill(1)
    program.run(generation=2)
    ending = program.it.ending()
    assert (ending.kind, ending.code) == ("exit", 2)
    assert program.imports() == 1, "not the standby process"
    assert program.it.text().count("saved by its thread") == 2
    assert program.it.text().count("saved by its exit handler") == 1
    assert not program.it.text("e")


@everywhere
def test_leftovers_of_a_body_end_and_the_standby_process_stays(program: Program, mode: Any) -> None:
    left = 'import subprocess\nsubprocess.Popen(["sleep", "600"], start_new_session=True)\n'
    program.write(left + RUNNING)
    for generation in (1, 2):
        program.run(generation=generation)
        program.kill(generation)
        mode.wait_for(
            lambda: len(program.it.processes()) == 2, "only the standby process and its own processes"
        )
    assert program.imports() == 1


@everywhere
def test_nothing_is_left_of_a_body_that_succeeds(program: Program) -> None:
    program.write("import heavy")
    program.run(generation=1)
    assert program.it.ending().code == 0
    program.it.nothing_left()


@everywhere
def test_it_goes_with_its_launcher(program: Program, mode: Any) -> None:
    program.write(RUNNING)
    program.run(generation=1)
    program.kill(1)
    assert program.it.processes()
    for pid in _launchers(program.it):
        os.kill(pid, signal.SIGKILL)
    program.it.nothing_left()


def test_a_stop_signals_the_body_and_not_the_standby_process(program: Program) -> None:
    program.write(
        """
        import heavy, os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(5)))
        print("running", os.environ["RANK"], flush=True)
        time.sleep(600)
        """
    )
    for generation in (1, 2):
        program.run(generation=generation)
        program.running(generation)
        program.it.order("stop", generation=generation, grace=60.0)
        assert program.it.ending(program.it.seq - 1).kind == "stopped"
    assert program.it.text().count("saved") == 2
    assert program.imports() == 1


def test_several_processes_have_a_standby_process_each(program: Program) -> None:
    program.write('import heavy, os\nprint("rank", os.environ["RANK"], flush=True)\nos.abort()\n')
    for generation in (1, 2):
        program.run(generation=generation, processes=[{"RANK": "0"}, {"RANK": "1"}])
        program.it.ending()
    assert program.imports() <= 3, "one of two may end before it leaves a standby process"


def test_random_numbers_differ_each_time(program: Program) -> None:
    program.write(
        "import heavy, random, uuid, os\nprint(random.random(), uuid.uuid4(), flush=True)\nos.abort()\n"
    )
    for generation in (1, 2, 3):
        program.run(generation=generation)
        program.it.ending()
    words = program.it.text().split()
    assert len(set(words)) == 6


def _launchers(it: Any) -> list[int]:
    found = json.loads((it.root / layout.ENGINE).read_text())
    return [found["pid"]]
