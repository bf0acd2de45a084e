"""The programs of images that tests make on this machine: busybox, under these names."""

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
