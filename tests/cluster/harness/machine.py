"""The requirements of a cluster on this machine, and the settings it changes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from harness.errors import HarnessError

__all__ = ["prepare"]

_TOOLS = {
    "ip": "iproute2",
    "iptables": "iptables",
    "nft": "nftables",
    "nsenter": "util-linux",
    "runc": "runc",
    "busybox": "busybox-static",
    "docker-registry": "docker-registry",
}
_AT_LEAST = {
    "net/ipv4/ip_forward": 1,
    # A kubelet takes dozens, and 128 is a common limit.
    "fs/inotify/max_user_instances": 8192,
    "fs/inotify/max_user_watches": 524288,
}


def prepare() -> None:
    """Raise limits that a cluster would reach. Raises with the missing programs and how to install them."""
    if os.geteuid() != 0:
        raise HarnessError(
            "the test cluster needs root: its nodes mount, make network interfaces and control groups; use sudo, "
            "or name a cluster with STOKER_TEST_KUBECONFIG"
        )
    missing = sorted({package for tool, package in _TOOLS.items() if shutil.which(tool) is None})
    if not any(Path(folder, "ptp").exists() for folder in ("/usr/lib/cni", "/opt/cni/bin")):
        missing.append("containernetworking-plugins")
    if missing:
        raise HarnessError(
            f"the test cluster needs {', '.join(missing)}; apt-get install {' '.join(missing)}"
        )
    for name, least in _AT_LEAST.items():
        path = Path("/proc/sys") / name
        if int(path.read_text()) < least:
            path.write_text(str(least))
