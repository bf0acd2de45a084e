"""The local engine: tasks are process trees on this machine that outlive the server.

engine       the protocol: submit, observe, stop, watch, hurt, resize
tasks/       task directories and launchers
containers/  tasks in containers of podman or docker
host/        what the machine has and can enforce
shell        command lines that lead into a task
doctor       what a person should know about this machine
"""

from __future__ import annotations

from stoker.engine.local.doctor import doctor_facts
from stoker.engine.local.engine import LocalEngine
from stoker.engine.local.tasks.records import end_holding, launchers

__all__ = ["LocalEngine", "doctor_facts", "end_holding", "launchers"]
