"""Explains from a pod's status why it does not start, or how it ended. Pure.

The values of `PodFinding.cause` and `PodFinding.hopeless` are those of `spec.states.Cause`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stoker.engine.kubernetes.quantity import size
from stoker.engine.kubernetes.status import image_errors, unschedulable
from stoker.spec.states import Cause
from stoker.task.units import readable_size

Object = Mapping[str, Any]

_OURS = ("init", "courier", "main")
"""The containers of a pod, in the order they start; a task without a launcher has only `main`."""
_EVENTS = 10
"""How many of the last events are kept as evidence."""
_LONGEST = 600
"""The most characters of a message that are kept."""


@dataclass(frozen=True)
class PodFinding:
    """`proof`: its launcher is dead, and this is the proof. `waiting`: why it does not run yet."""

    proof: str = ""
    cause: str = ""
    waiting: str = ""
    hopeless: str = ""
    """The cause of its end if nothing changes."""
    patience: float | None = None
    """Seconds until then; None: as the cluster's settings say."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    no_room: bool = False
    """The cluster has what it waits for, but others hold it."""


def look(pod: Object, events: Sequence[Object] = (), nodes: Sequence[Object] | None = None) -> PodFinding:
    """What the status of an existing pod says; an empty PodFinding if its launcher runs."""
    if (found := _ended(pod)) is not None or (found := _died(pod)) is not None:
        return _with_evidence(found, pod, events)
    found = _waiting(pod, events, nodes)
    return _with_evidence(found, pod, events) if found.waiting else found


def vanished(
    name: str, last: Object | None, events: Sequence[Object] = (), *, by_engine: bool = False
) -> PodFinding:
    """A pod that does not exist any more. `last`: its last state; `by_engine`: the engine ended it itself."""
    if last is not None:
        found = _ended(last) or _died(last) or _disrupted(last, name)
        if found is not None:
            return _with_evidence(found, last, events)
    if by_engine:
        return PodFinding(proof=f"pod {name} was ended")
    said = next((found for event in reversed(events) if (found := _by_event(event, name))), None)
    proof = f"pod {name} is gone: it or its node was deleted"
    return _with_evidence(said or PodFinding(proof=proof, cause=Cause.LOST), last or {}, events)


def refused(message: str, status: int) -> tuple[str, str]:
    """A pod that the API server refused: (an explanation, a hint)."""
    text = _cut(message)
    if found := re.search(r"exceeded quota: ([^,]{1,253}), (.*)", text):
        return f"the namespace's quota {found[1]} is used up: {found[2]}", QUOTA_HINT
    if found := re.search(r"status unknown for quota: ([^,]+)", text):
        return f"the namespace's quota {found[1]} is new, and not counted yet", QUOTA_HINT
    if "violates PodSecurity" in text:
        words = text[text.index("violates PodSecurity") :]
        return f"the namespace's pod security level does not admit it: it {words}", _SECURITY_HINT
    if found := re.search(r"admission webhook \"([^\"]+)\" denied the request:? ?(.*)", text, re.DOTALL):
        return f"the cluster's admission webhook {found[1]} refused it: {found[2]}", _ADMIN_HINT
    if status == 422:
        return f"the cluster refused the pod: {text}", "The cluster's `pod` template may be the reason."
    return f"the cluster refused the pod: {text}", _ADMIN_HINT


def over_quota(message: str) -> bool:
    """Refused for now: others have to end first, or the quota is new and its usage is not known yet."""
    return "exceeded quota" in message or "status unknown for quota" in message


QUOTA_HINT = "It is tried again until there is room; ask for less, or have the quota raised."
_SECURITY_HINT = "An admin can set the cluster's `security`, or label the namespace for the level it needs."
_ADMIN_HINT = "Ask an admin of the cluster."


# -- ended -----------------------------------------------------------------------------------------------------


def by_cluster(pod: Object) -> PodFinding | None:
    """The cluster ended or refused it: it did not end by itself."""
    status = pod.get("status") or {}
    name = pod["metadata"]["name"]
    reason, message = str(status.get("reason") or ""), _cut(status.get("message"))
    if reason == "Evicted":
        return _evicted(name, message)
    if found := _disrupted(pod, name):
        return found
    if reason in _REASONS:
        cause, words = _REASONS[reason]
        return PodFinding(f"pod {name} was ended: {words}{_after(message)}", cause)
    if reason.startswith("OutOf") or reason == "UnexpectedAdmissionError":
        fault = "device" in message.lower() or "gpu" in message.lower()
        cause = Cause.GPU_FAULT if fault and reason == "UnexpectedAdmissionError" else Cause.ENGINE_ERROR
        return PodFinding(f"its node refused pod {name}{_after(message or reason)}", cause)
    return None


def _ended(pod: Object) -> PodFinding | None:
    """The pod has ended as a whole: no container runs."""
    status = pod.get("status") or {}
    if status.get("phase") not in ("Failed", "Succeeded"):
        return None
    name = pod["metadata"]["name"]
    said = _cut(status.get("message")) or str(status.get("reason") or "")
    own = by_cluster(pod) or _by_container(pod, name)
    return own or PodFinding(f"pod {name} ended{_after(said)}", Cause.LOST)


_REASONS = {
    "NodeLost": (Cause.LOST, "its node was lost"),
    "NodeShutdown": (Cause.EVICTED, "its node is shutting down"),
    "Terminated": (Cause.EVICTED, "its node is shutting down"),
    "Shutdown": (Cause.EVICTED, "its node is shutting down"),
    "Preempting": (Cause.PREEMPTED, "its node needed the room for a system pod"),
    "DeadlineExceeded": (Cause.TIMEOUT, "it ran longer than it may"),
    "NodeAffinity": (Cause.ENGINE_ERROR, "its node's labels changed"),
}


def _evicted(name: str, message: str) -> PodFinding:
    """By the kubelet: the node is short of a resource, or the pod exceeded its disk limit."""
    if found := re.search(r"low on resource: ([\w.-]+)", message):
        what = {"memory": "memory", "ephemeral-storage": "disk", "pids": "process ids"}.get(
            found[1].rstrip("."), found[1].rstrip(".")
        )
        return PodFinding(
            f"pod {name} was evicted: its node ran short of {what}{_after(message)}", Cause.EVICTED
        )
    if "ephemeral" in message or "EmptyDir" in message:
        limit = re.search(r"\"([0-9][\w.]*)\"|containers ([0-9]\w*)", message)
        words = f" ({readable_size(size(limit[1] or limit[2]))})" if limit else ""
        return PodFinding(
            f"pod {name} was evicted: it used more disk than it may{words}; raise `resources.disk`{_after(message)}",
            Cause.DISK,
        )
    return PodFinding(f"pod {name} was evicted{_after(message)}", Cause.EVICTED)


def _disrupted(pod: Object, name: str) -> PodFinding | None:
    """Read from the condition that names the reason for a disruption."""
    condition = _condition(pod, "DisruptionTarget")
    if condition is None or condition.get("status") != "True":
        return None
    reason, message = str(condition.get("reason") or ""), _cut(condition.get("message"))
    cause, words = _DISRUPTIONS.get(reason, (Cause.EVICTED, f"the cluster ended it ({reason})"))
    return PodFinding(f"pod {name} was ended: {words}{_after(message)}", cause)


_DISRUPTIONS = {
    "PreemptionByScheduler": (Cause.PREEMPTED, "a pod of higher priority needed its place"),
    "DeletionByTaintManager": (Cause.EVICTED, "its node was tainted"),
    "EvictionByEvictionAPI": (Cause.EVICTED, "its node is being drained"),
    "DeletionByPodGC": (Cause.LOST, "its node was removed from the cluster"),
    "TerminationByKubelet": (Cause.EVICTED, "its node is short of something, or is shutting down"),
}


def _died(pod: Object) -> PodFinding | None:
    """The pod exists, but its first launcher has ended. The kubelet restarted the container, and it only waits."""
    main = status_of(pod, "main")
    if main is None or (not main.get("restartCount") and "terminated" not in (main.get("state") or {})):
        return None
    return _by_container(pod, pod["metadata"]["name"])


def _by_container(pod: Object, name: str) -> PodFinding | None:
    main = status_of(pod, "main")
    if main is None:
        return None
    ending = (main.get("state") or {}).get("terminated") or (main.get("lastState") or {}).get("terminated")
    if not ending:
        return None
    reason, message, code = (
        str(ending.get("reason") or ""),
        _cut(ending.get("message")),
        ending.get("exitCode"),
    )
    if reason == "OOMKilled":
        limit = memory_limit(pod)
        words = f" (limit {readable_size(limit)})" if limit else ""
        return PodFinding(
            f"container main of pod {name} ran out of memory{words}", Cause.OOM, evidence=_limit(limit)
        )
    if (image := image_errors.cannot_run(_image(pod, "main"), code, reason, message)) is not None:
        return PodFinding(f"its launcher cannot run: {image}", Cause.IMAGE)
    if code == 0:
        return PodFinding(f"its launcher ended (pod {name})")
    words = f"exit code {code}" if code is not None and code < 128 else f"signal {(code or 128) - 128}"
    return PodFinding(
        f"its launcher is gone: container main of pod {name} ended with {words}{_after(message)}", Cause.LOST
    )


# -- waiting ---------------------------------------------------------------------------------------------------


def _waiting(pod: Object, events: Sequence[Object], nodes: Sequence[Object] | None) -> PodFinding:
    scheduled = _condition(pod, "PodScheduled")
    if scheduled is not None and scheduled.get("status") == "False":
        return _not_placed(pod, scheduled, nodes)
    if not (pod.get("spec") or {}).get("nodeName"):
        return PodFinding(waiting="waits for the scheduler")
    for one in _containers(pod):
        if one.get("name") in _OURS and (found := _container_waits(pod, one["name"], events)) is not None:
            return found
    return PodFinding()


def _not_placed(pod: Object, condition: Object, nodes: Sequence[Object] | None) -> PodFinding:
    message = str(condition.get("message") or "")
    if condition.get("reason") == "SchedulingGated":
        return PodFinding(waiting="is held back by a scheduling gate", hopeless=Cause.ENGINE_ERROR)
    text = unschedulable.explain(message, unschedulable.requests_of(pod), nodes)
    return PodFinding(waiting=text, hopeless=Cause.ENGINE_ERROR, no_room=unschedulable.lacks_room(message))


def _container_waits(pod: Object, name: str, events: Sequence[Object]) -> PodFinding | None:
    status = status_of(pod, name)
    if status is None:
        return _being_made(pod, events)
    state, last = status.get("state") or {}, (status.get("lastState") or {}).get("terminated")
    waiting = state.get("waiting")
    ended = state.get("terminated")
    if name == "init" and ended is not None and ended.get("exitCode") == 0:
        return None
    if waiting is None and ended is None and not (name == "courier" and not status.get("started", True)):
        return _being_made(pod, ()) if name == "init" else None
    if (died := last or (ended if ended and ended.get("exitCode") else None)) is not None:
        return _fails(pod, name, died)
    reason, message = str((waiting or {}).get("reason") or ""), _cut((waiting or {}).get("message"))
    image = _image(pod, name)
    if reason in image_errors.PULLING:
        words = image_errors.cannot_pull(image, reason, message, [_cut(e.get("message")) for e in events])
        return PodFinding(
            waiting=words, hopeless=Cause.IMAGE, patience=0.0 if reason in image_errors.NEVER else None
        )
    if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
        why = image_errors.cannot_run(image, None, reason, message)
        cause = Cause.IMAGE if why else Cause.ENGINE_ERROR
        return PodFinding(
            waiting=f"container {name} cannot be started: {why or message or reason}", hopeless=cause
        )
    return _being_made(pod, events)


def _fails(pod: Object, name: str, ending: Object) -> PodFinding:
    """A container that runs Stoker's code ended before there was a launcher."""
    code, reason, message = (
        ending.get("exitCode"),
        str(ending.get("reason") or ""),
        _cut(ending.get("message")),
    )
    image = _image(pod, name)
    if (why := image_errors.cannot_run(image, code, reason, message)) is not None:
        return PodFinding(waiting=f"cannot be prepared: {why}", hopeless=Cause.IMAGE, patience=0.0)
    what = {"init": "its task directory cannot be created", "courier": "its courier does not stay up"}.get(
        name, "its launcher does not start"
    )
    words = "it ran out of memory" if reason == "OOMKilled" else f"exit code {code}"
    return PodFinding(waiting=f"{what}: {words}{_after(message)}", hopeless=Cause.ENGINE_ERROR)


def _being_made(pod: Object, events: Sequence[Object]) -> PodFinding:
    """The pod has a node, and its container statuses show no problem; a problem may still be in the events."""
    for event in reversed(events):
        reason, message = event.get("reason"), _cut(event.get("message"))
        if reason in ("FailedMount", "FailedAttachVolume", "FailedMapVolume"):
            return PodFinding(waiting=f"a volume cannot be mounted: {message}", hopeless=Cause.ENGINE_ERROR)
        if reason == "FailedCreatePodSandBox":
            return PodFinding(
                waiting=f"its node cannot create the pod's sandbox: {message}", hopeless=Cause.ENGINE_ERROR
            )
        if reason == "Pulling":
            found = re.search(r'"([^"]+)"', message)
            return PodFinding(waiting=f"pulls the image {found[1] if found else ''}".rstrip())
        if reason in ("Pulled", "Created", "Started", "Scheduled"):
            break
    return PodFinding(waiting=f"is being started on {(pod.get('spec') or {}).get('nodeName')}")


# -- events ----------------------------------------------------------------------------------------------------


def _by_event(event: Object, name: str) -> PodFinding | None:
    """Why a pod ended whose last state is not known, from an event."""
    reason, message = str(event.get("reason") or ""), _cut(event.get("message"))
    if reason == "Preempted":
        return PodFinding(
            f"pod {name} was ended: a pod of higher priority needed its place{_after(message)}",
            Cause.PREEMPTED,
        )
    if reason == "TaintManagerEviction" and "Cancel" not in message:
        return PodFinding(f"pod {name} was ended: its node was tainted{_after(message)}", Cause.EVICTED)
    if reason == "Evicted":
        return _evicted(name, message)
    return None


def _with_evidence(found: PodFinding, pod: Object, events: Iterable[Object]) -> PodFinding:
    """Adds the cluster's own messages, for readers who know them."""
    evidence: dict[str, Any] = dict(found.evidence)
    if name := (pod.get("metadata") or {}).get("name"):
        evidence["pod"] = name
    if node := (pod.get("spec") or {}).get("nodeName"):
        evidence["node"] = node
    status = pod.get("status") or {}
    for key in ("reason", "message"):
        if status.get(key):
            evidence[key] = _cut(status[key])
    if containers := _states(pod):
        evidence["containers"] = containers
    said = [
        f"{event.get('reason')}: {_cut(event.get('message'))}"
        for event in events
        if event.get("reason") not in ("Scheduled", "Pulled", "Created", "Started")
    ]
    if said:
        evidence["events"] = list(dict.fromkeys(said))[-_EVENTS:]
    return replace(found, evidence=evidence)


def _states(pod: Object) -> dict[str, Any]:
    """Exit codes and reasons of containers that are not simply running."""
    found: dict[str, Any] = {}
    for name in _OURS:
        status = status_of(pod, name) or {}
        for when in ("state", "lastState"):
            for kind in ("waiting", "terminated"):
                state = (status.get(when) or {}).get(kind)
                if state and state.get("reason") not in ("Completed", "PodInitializing", "ContainerCreating"):
                    kept = {key: state[key] for key in ("reason", "exitCode", "signal") if key in state}
                    if state.get("message"):
                        kept["message"] = _cut(state["message"])
                    found.setdefault(name, kept)
    return found


# -- parts of a pod --------------------------------------------------------------------------------------------


def status_of(pod: Object, name: str) -> Object | None:
    status = pod.get("status") or {}
    kind = "containerStatuses" if name == "main" else "initContainerStatuses"
    return next((one for one in status.get(kind) or () if one.get("name") == name), None)


def courier_runs(pod: Object) -> bool:
    """Whether its courier can be called."""
    status = status_of(pod, "courier")
    return status is not None and "running" in (status.get("state") or {})


def _condition(pod: Object, kind: str) -> Object | None:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((one for one in conditions if one.get("type") == kind), None)


def _containers(pod: Object) -> list[Object]:
    spec = pod.get("spec") or {}
    return [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]


def _image(pod: Object, name: str) -> str:
    return next((str(one.get("image")) for one in _containers(pod) if one.get("name") == name), "")


def memory_limit(pod: Object) -> int | None:
    main = next((one for one in _containers(pod) if one.get("name") == "main"), {})
    limit = ((main.get("resources") or {}).get("limits") or {}).get("memory")
    return None if limit is None else size(str(limit))


def _limit(value: int | None) -> dict[str, Any]:
    return {"limit": value} if value else {}


def _after(message: str) -> str:
    return f": {message}" if message else ""


def _cut(message: Any) -> str:
    """On one line, and shortened."""
    text = " ".join(str(message or "").split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
