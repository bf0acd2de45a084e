"""What images that are made on this machine have for programs: busybox, under these names."""

from __future__ import annotations

APPLETS = (
    "sh",
    "cat",
    "echo",
    "env",
    "id",
    "kill",
    "ls",
    "ps",
    "pwd",
    "seq",
    "sleep",
    "test",
    "touch",
    "true",
)
