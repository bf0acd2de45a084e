"""The pure parts of control groups: where they are, what is written into them, which records are accepted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.engine.local.host import cgroups, isolation
from stoker.engine.local.host.cgroups import CgroupTree, Limits
from stoker.linux import cgroup_paths

V1_MOUNTS = """\
24 1 0:20 / /proc rw - proc proc rw
31 24 0:26 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct
32 24 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
33 24 0:28 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
34 24 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
V1_OWN = "4:memory:/user/alice\n3:pids:/\n2:cpu,cpuacct:/user\n0::/init.scope\n"
V2_MOUNTS = "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"


def test_own_directories_of_version_1() -> None:
    assert cgroup_paths.find(V1_MOUNTS, V1_OWN) == (
        {
            "cpu": "/sys/fs/cgroup/cpu,cpuacct/user",
            "cpuacct": "/sys/fs/cgroup/cpu,cpuacct/user",
            "memory": "/sys/fs/cgroup/memory/user/alice",
            "pids": "/sys/fs/cgroup/pids",
        },
        "/sys/fs/cgroup/unified/init.scope",
    )
    assert cgroups.mounts(V1_MOUNTS)[:2] == ["/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/memory"]


def test_own_directory_of_version_2() -> None:
    own = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/stoker.service\n"
    first, second = cgroup_paths.find(V2_MOUNTS, own)
    assert (first, second) == (
        {},
        "/sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service/app.slice/stoker.service",
    )


def test_a_container_sees_only_its_part_of_the_hierarchy() -> None:
    mounts = "32 24 0:27 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    assert cgroup_paths.find(mounts, "4:memory:/docker/abc\n")[0] == {"memory": "/sys/fs/cgroup/memory"}
    assert cgroup_paths.find(mounts, "4:memory:/docker/abc/inner\n")[0] == {
        "memory": "/sys/fs/cgroup/memory/inner"
    }
    assert cgroup_paths.find(mounts, "4:memory:/\n")[0] == {"memory": "/sys/fs/cgroup/memory"}


def test_blanks_in_mount_points() -> None:
    mounts = "32 24 0:27 / /mnt/c\\040groups rw - cgroup cgroup rw,pids\n"
    assert cgroup_paths.find(mounts, "4:pids:/\n")[0] == {"pids": "/mnt/c groups"}


ALL = Limits(cpu=1.5, memory=1 << 30, pids=100, denied_devices=((195, 1),))


def test_what_is_written_in_version_1() -> None:
    assert cgroups.settings(1, cgroup_paths.V1_CONTROLLERS, ALL) == [
        ("memory", "memory.limit_in_bytes", "1073741824"),
        ("memory", "memory.memsw.limit_in_bytes", "1073741824"),
        ("cpu", "cpu.cfs_period_us", "100000"),
        ("cpu", "cpu.cfs_quota_us", "150000"),
        ("cpu", "cpu.shares", "1536"),
        ("pids", "pids.max", "100"),
        ("devices", "devices.deny", "c 195:1 rwm"),
    ]


def test_what_is_written_in_version_2() -> None:
    assert cgroups.settings(2, cgroups.V2_CONTROLLERS, ALL) == [
        ("memory", "memory.max", "1073741824"),
        ("memory", "memory.swap.max", "0"),
        ("memory", "memory.oom.group", "1"),
        ("cpu", "cpu.max", "150000 100000"),
        ("cpu", "cpu.weight", "150"),
        ("pids", "pids.max", "100"),
    ]


def test_no_request_is_no_limit_and_missing_controllers_are_left_out() -> None:
    assert cgroups.settings(1, cgroup_paths.V1_CONTROLLERS, Limits(pids=4096)) == [
        ("pids", "pids.max", "4096")
    ]
    assert cgroups.settings(2, ["pids"], ALL) == [("pids", "pids.max", "100")]


@pytest.mark.parametrize(("cpu", "quota"), [(0.001, 1000), (0.5, 50_000), (1, 100_000), (64, 6_400_000)])
def test_quotas(cpu: float, quota: int) -> None:
    assert cgroups.quota(cpu) == quota


def test_the_record_of_a_task() -> None:
    first = CgroupTree(
        1, {"memory": "/c/memory/h", "cpu": "/c/cpu/h", "cpuacct": "/c/cpu/h", "devices": "/c/devices/h"}
    )
    assert first.record("r.1.w") == {
        "version": 1,
        "procs": [
            "/c/memory/h/r.1.w/cgroup.procs",
            "/c/cpu/h/r.1.w/cgroup.procs",
            "/c/devices/h/r.1.w/cgroup.procs",
        ],
        "memory": "/c/memory/h/r.1.w",
        "cpu": "/c/cpu/h/r.1.w",
        "cpuacct": "/c/cpu/h/r.1.w",
    }
    second = CgroupTree(2, {"memory": "/c/h", "cpu": "/c/h", "pids": "/c/h"})
    assert second.record("r.1.w") == {
        "version": 2,
        "procs": ["/c/h/r.1.w/cgroup.procs"],
        "memory": "/c/h/r.1.w",
        "cpu": "/c/h/r.1.w",
        "pids": "/c/h/r.1.w",
        "freezer": "/c/h/r.1.w",
    }


GOOD = {"version": 1, "procs": ["/sys/fs/cgroup/memory/u/stoker-1/r.1.w/cgroup.procs"]}


@pytest.mark.parametrize(
    "record",
    [
        None,
        "x",
        {},
        {"procs": "/sys/fs/cgroup/memory/stoker-1/x/cgroup.procs"},
        {"procs": ["/sys/fs/cgroup/memory/system.slice/ssh/cgroup.procs"]},
        {"procs": ["/sys/fs/cgroup/memory/stoker-1/../system.slice/cgroup.procs"]},
        {"procs": ["/etc/stoker-1/x/cgroup.procs"]},
        {"procs": [7]},
        {**GOOD, "freezer": "/sys/fs/cgroup/freezer/system.slice"},
        {"procs": ["/sys/fs/cgroup/memory/u/stoker-1/neighbour.1.w/cgroup.procs"]},
        {**GOOD, "freezer": "/sys/fs/cgroup/freezer/u/stoker-1/neighbour.1.w"},
    ],
)
def test_a_record_changed_by_user_code_is_refused(record: object) -> None:
    assert (
        cgroups.trusted(record, "stoker-1/r.1.w", ["/sys/fs/cgroup/memory", "/sys/fs/cgroup/freezer"]) is None
    )
    assert cgroups.trusted(GOOD, "stoker-1/r.1.w", ["/sys/fs/cgroup/memory"]) == GOOD
    assert cgroups.trusted(GOOD, "stoker-2/r.1.w", ["/sys/fs/cgroup/memory"]) is None


def test_two_homes_never_share_a_group(tmp_path: Path) -> None:
    assert cgroups.home_name(tmp_path / "a") != cgroups.home_name(tmp_path / "b")
    assert cgroups.home_name(tmp_path / "a") == cgroups.home_name(tmp_path / "a")


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    """A delegated group of version 2 as plain files."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "cgroup.type").write_text("domain")
    (own / "cgroup.controllers").write_text("cpuset cpu io memory pids")
    (own / "cgroup.procs").write_text(f"{os.getpid()}\n")
    (own / "cgroup.subtree_control").write_text("")
    return own


def test_a_delegated_group_is_divided(unified: Path) -> None:
    assert isolation.delegate(str(unified), "stoker-1", {os.getpid()}) is None
    assert (unified / "stoker-server" / "cgroup.procs").read_text() == str(os.getpid())
    assert (unified / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert (unified / "stoker-1" / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"


def test_a_group_with_other_processes_is_left_alone(unified: Path) -> None:
    (unified / "cgroup.procs").write_text(f"{os.getpid()}\n1\n")
    problem = isolation.delegate(str(unified), "stoker-1", {os.getpid()})
    assert problem is not None and "other processes (1" in problem
    assert not (unified / "stoker-server").exists()
    assert (unified / "cgroup.subtree_control").read_text() == ""


def test_a_group_without_controllers_is_not_delegated(unified: Path) -> None:
    (unified / "cgroup.controllers").write_text("hugetlb\n")
    assert (
        isolation.delegate(str(unified), "stoker-1", {os.getpid()})
        == f"no controllers are delegated to {unified}"
    )


def test_groups_are_made_and_removed_with_their_children(tmp_path: Path) -> None:
    tree = CgroupTree(2, {"memory": str(tmp_path), "pids": str(tmp_path)})
    cgroups.make(tree, "r.1.w", Limits(memory=1 << 20, pids=7))
    made = tmp_path / "r.1.w"
    assert ((made / "memory.max").read_text(), (made / "pids.max").read_text()) == ("1048576", "7")
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +pids"
    for name in ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max"):
        (made / name).unlink(missing_ok=True)  # the kernel removes the files of a real group
    (made / "made" / "by" / "the-task").mkdir(parents=True)
    cgroups.remove(tree.record("r.1.w"))
    assert not made.exists()


def test_leftovers_of_every_place_ever_used_are_removed(tmp_path: Path) -> None:
    earlier, now = tmp_path / "session-1" / "stoker-1", tmp_path / "session-2" / "stoker-1"
    for root in (earlier, now):
        (root / "dead.1.w").mkdir(parents=True)
        (root / "kept.1.w").mkdir()
    file = tmp_path / "engine" / "cgroups.json"
    cgroups.remember(file, CgroupTree(2, {"memory": str(earlier)}), {"kept.1.w"})
    cgroups.remember(file, CgroupTree(2, {"memory": str(now)}), {"kept.1.w"})
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("session-*/*/*")) == [
        "session-1/stoker-1/kept.1.w",
        "session-2/stoker-1/kept.1.w",
    ]
