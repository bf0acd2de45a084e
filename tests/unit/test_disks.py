"""The state of a file system, in words for users."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker import disks
from stoker.engine.local import doctor
from stoker.engine.local.doctor import Health
from stoker.engine.local.host.isolation import Isolation
from stoker.settings import Home, Settings

MOUNTS = [
    "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n",
    "41 27 7:1 / /data/a\\040b rw,relatime - ext4 /dev/loop1 rw,errors=remount-ro,emergency_ro\n",
    "42 27 7:2 / /data/over rw,relatime - ext4 /dev/loop2 rw,errors=remount-ro,emergency_ro\n",
    "43 27 7:3 / /data/over rw,relatime - ext4 /dev/loop3 rw\n",
    "44 27 0:30 / /data/emergency_ro rw - tmpfs tmpfs rw\n",
]


def test_a_file_system_that_turned_itself_read_only_is_recognised() -> None:
    """ext4 does so after an error, and shows it only in the kernel's list of mounts."""
    assert disks._gave_up(MOUNTS, "/data/a b")
    for mount in ("/", "/data/over", "/data/emergency_ro", "/data/none"):
        assert not disks._gave_up(MOUNTS, mount), mount


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system for 8 files."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("a file system can only be mounted as root")
    options = "size=256m,nr_inodes=9"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a file system: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def facts(home: Path) -> dict[str, doctor.Fact]:
    return {fact.name: fact for fact in doctor.doctor_facts(Settings(Home(home)), Isolation())}


def test_no_inodes_is_not_called_a_want_of_bytes(mounted: Path) -> None:
    assert facts(mounted)["disk"].status is not Health.FAIL
    for number in range(8):
        (mounted / str(number)).touch()
    with pytest.raises(OSError) as caught:
        (mounted / "one more").touch()
    assert caught.value.errno == errno.ENOSPC
    error = disks.refusal(caught.value, mounted / "one more")
    assert error is not None and "no inodes for new files" in error.message
    assert (error.hint or "").startswith("Remove some files")
    found = facts(mounted)["disk"]
    assert (found.status, found.fix) == (Health.FAIL, "Remove some files.")
    for number in range(8):
        (mounted / str(number)).unlink()
    assert "but no inodes" not in disks.full(mounted).message


def test_doctor_names_a_read_only_and_a_full_file_system(mounted: Path) -> None:
    with (mounted / "ballast").open("wb") as file:
        file.truncate(250 << 20)
        os.posix_fallocate(file.fileno(), 0, 250 << 20)
    assert facts(mounted)["disk"].status is Health.FAIL
    (mounted / "ballast").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    assert disks.is_read_only(mounted / "home")
    found = facts(mounted / "home")["home"]
    assert found.status is Health.FAIL and f"read-only file system, {mounted}" in found.text
    assert f"mount -o remount,rw {mounted}" in found.fix
