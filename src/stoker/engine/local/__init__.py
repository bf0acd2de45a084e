"""The local engine: tasks are process trees on this machine that outlive the server.

engine       the protocol: submit, observe, stop, watch, hurt
render       what will be written for a task; pure
registry     the tasks there are, and the proof that one is gone;  following: until then
directories  task directories: making, archiving, deleting
forkserver   starting launchers through a process of their own
watch        noticing changes: inotify, pidfds
isolation    what the machine lets us enforce, found by trying
cgroups      limits, one group per task
machine      cores and memory there are;  gpus: the same by NVML
boxes        tasks in containers;  containers: the command lines;  runtimes: asking podman or docker
sizes        changing the limits of a task while it runs;  entering: a person's way in
doctor       what a person should know about this machine
"""

from __future__ import annotations

from stoker.engine.local.doctor import Fact, doctor_facts
from stoker.engine.local.engine import LocalEngine
from stoker.engine.local.host.isolation import Isolation, probe
from stoker.engine.local.tasks.records import end_holding, launchers
from stoker.engine.local.tasks.task_info import render

__all__ = ["Fact", "Isolation", "LocalEngine", "doctor_facts", "end_holding", "launchers", "probe", "render"]
