"""The parts of the home that are visible to a run whose task directory is inside."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.local.tasks.starter import cover_of
from stoker.settings import Home

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux")

Make = Callable[..., Any]
SECRET = "sesame-open-1234"
LOOK = """
echo "home: $(ls -A "$HOME_OF" | sort | tr '\\n' ' ')"
while [ ! -e "$STOKER_OUTPUT_DIR/go" ]; do sleep 0.05; done
grep -rs "{secret}" {everywhere} && echo leaked
echo "then: $(ls -A "$HOME_OF" | sort | tr '\\n' ' ')"
(echo x > "$HOME_OF/new") 2>/dev/null && echo written
(echo x > "$HOME_OF/engine/bundle/v1/code.py") 2>/dev/null && echo tampered
cat "$HOME_OF/engine/bundle/v1/code.py" "$HOME_OF/mine/data"
echo made > "$HOME_OF/setups/made"; echo out > "$STOKER_OUTPUT_DIR/out"; ls "$STOKER_TASK_DIR" | grep order.json
"""


def furnish(home: Home) -> None:
    """A home in use, with one directory that is not the server's."""
    for path in (home.tasks / "other" / "1", home.setups, home.engine / "bundle" / "v1", home.root / "mine"):
        path.mkdir(parents=True)
    (home.root / "mine" / "data").write_text("of mine\n")
    (home.engine / "bundle" / "v1" / "code.py").write_text("of the bundle\n")


def use(home: Home) -> None:
    """Later additions: the first secret, settings, a replaced key, records, another run, unknown files."""
    for path in (
        home.secrets / "a.json",
        home.config,
        home.token,
        home.database,
        home.root / "stoker.db-wal",
        home.engine / "tasks" / "other.1.worker-0.json",
        home.tasks / "other" / "1" / "secrets.json",
        home.runs / "other" / "log",
        home.backups / "home-1" / "stoker.db",
        home.blobs / "ab" / "abcd",
        home.root / "something-else",
        home.root / "some-place" / "file",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_name(path.name + ".tmp")
        made.write_text(SECRET)
        made.chmod(0o644)
        made.rename(path)


@pytest.fixture
def mounted(place: Path) -> Iterator[Path]:
    """The directory again, mounted at another path."""
    again = Path(f"{place}-again")
    again.mkdir()
    done = subprocess.run(["mount", "--bind", str(place), str(again)], capture_output=True)
    yield again
    if done.returncode == 0:
        subprocess.run(["umount", str(again)], check=True)
    again.rmdir()


@pytest.mark.parametrize("mode", ["namespace", "user-namespace"], indirect=True)
@pytest.mark.parametrize("way", ["plain", "linked home", "linked tasks"])
def test_a_run_sees_nothing_of_the_home_now_or_later(
    mode: Any, task: Make, place: Path, mounted: Path, way: str
) -> None:
    real = Home(place / "home")
    furnish(real)
    real.token.write_text(SECRET)
    home = real
    if way == "linked home":
        (place / "link").symlink_to("home")
        home = Home(place / "link")
    if way == "linked tasks":
        real.tasks.rename(place / "tasks")
        real.tasks.symlink_to(place / "tasks")
    (home.tasks / "r-1" / "1").mkdir(parents=True)
    it = task(f"{home.root.name}/tasks/r-1/1/worker-0")
    if mode.uid is not None:
        for path in (place, *place.rglob("*")):
            os.chown(path, mode.uid, mode.uid, follow_symlinks=False)
    mode.cover = cover_of(home)
    mode.start(it)
    everywhere = [home.root, real.root, mounted, place / "tasks"]
    it.sh(
        LOOK.format(secret=SECRET.replace("-", "[-]"), everywhere=" ".join(map(str, everywhere))),
        env={"HOME_OF": str(home.root)},
    )
    it.said("home:")
    use(real)
    (it.root / "output" / "go").write_text("")
    assert it.ending().code == 0, it.text("e") + it.errors()
    assert it.text().splitlines() == [
        "home: engine mine setups tasks ",
        "then: engine mine setups tasks ",
        "of the bundle",
        "of mine",
        "order.json",
    ]
    assert (real.setups / "made").read_text() == "made\n"
    assert (it.root / "output" / "out").read_text() == "out\n"
    assert it.errors() == ""
