"""A real Kubernetes cluster on one machine, for tests: etcd, control plane, kubelets, containerd.

Every part is a process of this machine, started and recorded here (`processes`). Mounts, cgroups, links and
rules are found again by their place. So the next start can clean up after any interruption (`cleanup`). It
needs root.
"""

from harness.binaries import binary
from harness.cluster import Cluster
from harness.errors import HarnessError
from harness.images import Image, push
from harness.layout import Layout

__all__ = ["Cluster", "HarnessError", "Image", "Layout", "binary", "push"]
