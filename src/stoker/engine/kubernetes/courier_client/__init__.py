"""Task directories in pods, seen from the server: the client of the courier (stoker.courier).

connections     one task directory and one poller per pod
routes          the ways to a pod's courier, and which one works
transport       one call to a courier, however it is reached
client          Courier: authenticated calls over a transport
blocking_calls  the same from worker threads
mirror          what has arrived of a remote task directory
poller          keeps a mirror up to date
task_directory  RemoteTaskDir: a task directory behind a courier
upload          sends a tree: only what the courier lacks
"""

from stoker.engine.kubernetes.courier_client.client import Courier, CourierGone, CourierLost
from stoker.engine.kubernetes.courier_client.mirror import Mirror
from stoker.engine.kubernetes.courier_client.poller import Poller, PollInterval
from stoker.engine.kubernetes.courier_client.task_directory import RemoteTaskDir
from stoker.engine.kubernetes.courier_client.transport import StreamTransport, Transport, direct

__all__ = [
    "Courier",
    "CourierGone",
    "CourierLost",
    "RemoteTaskDir",
    "Poller",
    "Mirror",
    "PollInterval",
    "StreamTransport",
    "Transport",
    "direct",
]
