"""A real Kubernetes cluster on one machine, for tests: etcd, the control plane, nodes with kubelet and containerd.

Everything is a process of this machine, started and recorded here (`processes`), and everything it leaves in the
kernel (mounts, cgroups, links, rules) is found again by where it is, so that whatever was interrupted can be
ended fully by the next start (`cleanup`). It needs root.
"""

from harness.binaries import binary
from harness.cluster import Cluster
from harness.errors import HarnessError
from harness.images import Image, push
from harness.layout import Layout

__all__ = ["Cluster", "HarnessError", "Image", "Layout", "binary", "push"]
