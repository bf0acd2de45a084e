"""Task directories in pods, seen from the server: the client of the courier (stoker.courier).

transport   one call to a courier, however it is reached
courier     authenticated calls over a transport
mirror      what has arrived of a directory, on this machine
directory   RemoteTaskDir: a task directory behind a courier
ferry       keeps a mirror up to date
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
