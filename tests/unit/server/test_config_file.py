"""One setting in config.toml is changed; all other text stays as it was written."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from stoker.errors import Conflict
from stoker.server.config_file import set_database, with_database

URL = 'postgresql://ada:pa"ss%40\\@host/db'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "[server]\n{}\n"),
        ("[logs]\nbudget = 1 # mine\n", "[logs]\nbudget = 1 # mine\n[server]\n{}\n"),
        ("[server]\nport = 80\n", "[server]\n{}\nport = 80\n"),
        ("[server]  # here", "[server]  # here\n{}\n"),
        ('[server]\ndatabase = "x://y"\n\n[logs]\n', "[server]\n{}\n\n[logs]\n"),
        ("# a\n[logs]\nbudget=1", "# a\n[logs]\nbudget=1\n[server]\n{}\n"),
    ],
)
def test_a_setting_is_set_and_removed(before: str, after: str) -> None:
    changed = with_database(before, URL)
    assert changed is not None
    line = next(line for line in changed.splitlines() if line.startswith("database"))
    assert changed == after.replace("{}", line)
    assert tomllib.loads(changed)["server"]["database"] == URL
    without = with_database(changed, None)
    assert without is not None and "database" not in without
    assert {**tomllib.loads(changed), "server": None} == {**tomllib.loads(without), "server": None}


@pytest.mark.parametrize(
    "strange",
    [
        'server.database = "x://y"\n',
        "server = {port = 80}\n",
        "[server\n",
        '[ server ]\ndatabase = """\nx"""\n',
    ],
)
def test_unusual_syntax_is_left_to_the_user(strange: str, tmp_path: Path) -> None:
    assert with_database(strange, URL) is None
    path = tmp_path / "config.toml"
    path.write_text(strange)
    with pytest.raises(Conflict) as caught:
        set_database(path, URL)
    assert path.read_text() == strange and "by hand" in (caught.value.hint or "")
    assert "ada" not in caught.value.message


def test_the_file_becomes_private(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[server]\n")
    path.chmod(0o644)
    set_database(path, URL)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [found.name for found in tmp_path.iterdir()] == ["config.toml"]
