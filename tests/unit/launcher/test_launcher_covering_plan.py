"""Which directories of a home are covered, from names and mounts alone."""

from __future__ import annotations

from pathlib import Path

from stoker.launcher.forkserver.home_cover import Mounted, elsewhere, foreign, is_own, mounts
from stoker.settings import Home

HOME = Home(Path("/home/ada/stoker"))


def test_lines_of_mountinfo() -> None:
    text = "29 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n40 29 0:31 / /mnt/my\\040disk rw shared:7 - tmpfs tmpfs rw\n"
    assert mounts(text) == [Mounted("254:0", "/", "/"), Mounted("0:31", "/", "/mnt/my disk")]


def test_the_same_directory_through_other_mounts() -> None:
    place = "/home/ada/stoker"
    root, disk = Mounted("8:1", "/", "/"), Mounted("8:2", "/", "/home")
    assert elsewhere(place, [root, disk]) == []
    again = Mounted("8:2", "/", "/mnt/all")
    part = Mounted("8:2", "/ada", "/srv/ada")
    inside = Mounted("8:2", "/ada/stoker/secrets", "/srv/secrets")
    beside = Mounted("8:2", "/bob", "/srv/bob")
    other = Mounted("8:3", "/ada/stoker", "/srv/other")
    assert elsewhere(place, [root, disk, again, part, inside, beside, other]) == [
        ("/mnt/all/ada/stoker", place),
        ("/srv/ada/stoker", place),
        ("/srv/secrets", f"{place}/secrets"),
    ]
    # A later mount at the same point hides the earlier one.
    assert elsewhere(place, [root, Mounted("8:9", "/", "/home"), disk, again]) == [
        ("/mnt/all/ada/stoker", place)
    ]
    # Mounts below the home are hidden when the home is covered.
    assert elsewhere(place, [root, disk, Mounted("8:2", "/ada/stoker/blobs", f"{place}/runs")]) == []


def test_files_of_the_server_in_a_home() -> None:
    for name in (
        "secrets",
        "secrets.old",
        "stoker.db-wal",
        "tasks",
        "config.toml~",
        "mirror",
        "engine",
        "token.new",
    ):
        assert is_own(name, HOME.names), name
    for name in ("data", "venv", "secretsanta", "my-runs", ".cache"):
        assert not is_own(name, HOME.names), name


def test_directories_and_links_of_a_user_in_the_home(tmp_path: Path) -> None:
    for name in ("data", "secrets", "runs.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "big").symlink_to("/mnt/big")
    (tmp_path / "token").symlink_to("elsewhere")
    assert foreign(str(tmp_path), HOME.names) == (
        [str(tmp_path / "data")],
        [(str(tmp_path / "big"), "/mnt/big")],
    )
    assert foreign(str(tmp_path / "absent"), HOME.names) == ([], [])
