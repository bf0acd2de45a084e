"""Turns a pod template into one piece of a job: what one group of equal tasks runs, with what, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from stoker.spec import quantities
from stoker.spec.interop import amounts, expansion, mounts
from stoker.spec.interop.expansion import Variables
from stoker.spec.interop.ledger import At, Ledger, Level, View
from stoker.spec.problems import show
from stoker.spec.quantities import show_duration

MAIN = "main"
"""Name of the training's container in Stoker's pods."""
_PLACED = (
    "nodeSelector",
    "tolerations",
    "affinity",
    "topologySpreadConstraints",
    "imagePullSecrets",
    "hostAliases",
    "dnsConfig",
    "dnsPolicy",
)
_NO_CLUSTER = "there is no cluster where it could mean anything"
_BEYOND = "gives the pod a part of its host"


@dataclass(frozen=True)
class Target:
    """Where the runs will go."""

    cluster: bool = False
    """To pods; else to this machine."""
    images: bool = True
    """Whether a container runtime exists; on a cluster always."""
    volumes: Mapping[str, str] = field(default_factory=dict)
    """Without a cluster: claim -> folder."""

    @property
    def folders(self) -> dict[str, str] | None:
        return None if self.cluster else dict(self.volumes)


@dataclass
class Piece:
    """One group of equal tasks."""

    at: At
    image: str | None = None
    words: list[str] | None = None
    """The command; None: the image's own."""
    args: list[str] = field(default_factory=list)
    """Arguments of the image's own command."""
    first: list[str] = field(default_factory=list)
    """Shell commands that run before it."""
    variables: Variables = field(default_factory=Variables)
    env: dict[str, str] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)
    resources: dict[str, Any] = field(default_factory=dict)
    mounts: dict[str, str] = field(default_factory=dict)
    pod: dict[str, Any] = field(default_factory=dict)
    """Additions to its pods, in Kubernetes' form."""
    restart: str | None = None
    grace: float | None = None
    timeout: float | None = None
    lines: dict[At, At] = field(default_factory=dict)
    """Key of the job -> its place in the file."""

    def run(self) -> str | list[str] | None:
        return None if self.words is None else expansion.command(self.words, self.variables, self.first)


def piece(
    template: View, target: Target, *, named: str | None = None, whole: bool = True, runs: bool = True
) -> Piece:
    """`template`: with metadata and spec. `named`: the container that trains, where there are several. `whole`: it
    must have a command; else it only adds to something. `runs`: its command is run, and not only its resources
    reserved."""
    found = Piece(at=template.at)
    spec = template.child("spec", "pod")
    if template.scope == "document":
        template.take("metadata")  # a Pod's metadata is read with the document
    else:
        _metadata(template.child("metadata", "metadata"), found, target)
    if whole or "containers" in spec:
        container = _container(spec, named)
    else:
        container = spec.child("containers", "container")
    if container is None:
        return found
    found.image = container.text("image")
    if whole and not found.image:
        container.mistake("image", "is missing", "Name the image that the container runs.")
    found.lines[("image",)] = container.path("image")
    if container.take("imagePullPolicy") in ("Always", "Never"):
        container.note("imagePullPolicy", "images are pulled where they are missing", Level.SAID)
    command(container, found, target)
    found.resources = amounts.resources(
        container.take("resources"), container.path("resources"), template.ledger, cluster=target.cluster
    )
    _volumes(spec, container, found, target)
    if whole and not target.images:
        without_image(container, found, runs=runs)
    _security(spec, container, found, target)
    _placing(spec, found, target)
    found.restart = spec.text("restartPolicy")
    found.grace = spec.number("terminationGracePeriodSeconds", partial(quantities.duration, zero=True))
    found.timeout = spec.number("activeDeadlineSeconds", quantities.duration)
    return found


def command(container: View, found: Piece, target: Target) -> None:
    """Reads the command and its variables."""
    _environment(container, found, target)
    _command(container, found)


def _metadata(view: View, found: Piece, target: Target) -> None:
    """Metadata of a template. Labels and annotations are for readers of pods, so without pods they have no effect."""
    for key in ("labels", "annotations"):
        value = view.take(key)
        if isinstance(value, Mapping) and value and target.cluster:
            found.pod.setdefault("metadata", {})[key] = dict(value)
    for key in ("name", "generateName"):
        view.take(key)


def _container(spec: View, named: str | None) -> View | None:
    views = list(spec.items("containers", "container"))
    if not views:
        spec.mistake(
            "containers", "is missing" if "containers" not in spec else "is empty", "Add a container."
        )
        return None
    chosen = (
        next((view for view in views if view.value.get("name") == named), views[0]) if named else views[0]
    )
    for view in views:
        view.take("name")
        if view is not chosen:
            which = show(chosen.value.get("name") or "the first")
            why = f"a task is one container, and {which} is the one that trains"
            view.whole()
            spec.ledger.note(view.at, view.value.get("name") or "", why)
    return chosen


def _environment(container: View, found: Piece, target: Target) -> None:
    variables = found.variables
    from_: list[dict[str, Any]] = []
    for view in container.items("envFrom", "from") if container.scope == "container" else ():
        if "configMapRef" in view and target.cluster:
            from_.append({key: view.take(key) for key in ("configMapRef", "prefix") if key in view})
        elif "configMapRef" in view:
            view.take("prefix")
            view.note("configMapRef", "there is no cluster to take it from")
    later: list[dict[str, Any]] = []
    for view in container.items("env", "env"):
        name = view.text("name")
        if not name:
            view.mistake("name", "is missing", "Every variable has a name.")
            continue
        found.lines[("env", name)] = view.path("name")
        value, source = view.text("value"), view.take("valueFrom")
        if source is not None:
            _from_elsewhere(view, name, source, found, later, target)
        elif value is not None and variables.needs(value):
            variables.later.add(name)
            later.append({"name": name, "value": value})
        else:
            found.env[name] = variables.known[name] = variables.fill(value or "")
            variables.later.discard(name)
    addition = {key: value for key, value in (("env", later), ("envFrom", from_)) if value}
    if addition:
        _main(found).update(addition)


def _from_elsewhere(
    view: View, name: str, source: Any, found: Piece, later: list[dict[str, Any]], target: Target
) -> None:
    kind = next(iter(source), "") if isinstance(source, Mapping) else ""
    known = ("secretKeyRef", "configMapKeyRef", "fieldRef", "resourceFieldRef")
    found.env.pop(name, None)
    if kind == "secretKeyRef":
        what = view.ledger.view(source[kind], (*view.path("valueFrom"), kind), "secret")
        of = f"{what.text('name')}/{what.text('key')}"
        found.secrets.append(name)
        found.variables.later.add(name)
        why = f"a secret of the run: its value is read at submit, not from {of}"
        view.note("valueFrom", why, Level.SAID)
    elif kind not in known:
        view.mistake(
            "valueFrom", f"is {show(source)}, which is not a known source", f"Choices: {', '.join(known)}."
        )
    elif target.cluster:
        found.variables.later.add(name)
        later.append({"name": name, "valueFrom": source})
    else:
        view.note("valueFrom", "there is no cluster to take it from")


def _command(container: View, found: Piece) -> None:
    command, args = container.strings("command"), container.strings("args")
    where = container.text("workingDir") if container.scope == "container" else None
    if command:
        found.words = [*command, *(args or ())]
    elif args:
        found.args = [found.variables.fill(word) for word in args]
        if any(found.variables.needs(word) for word in args):
            container.note("args", "holds a value that only a running pod has; write `command` as well")
    found.lines[("run",)] = container.path("command" if command else "args")
    if where and found.words is not None:
        found.first.append(f"cd {expansion.shell([where], found.variables)}")
    elif where:
        container.note(
            "workingDir", "the image's own command starts where the image says; write `command` as well"
        )


def _volumes(spec: View, container: View, found: Piece, target: Target) -> None:
    have = mounts.mounted(spec, container, target.folders)
    found.mounts = have.mounts
    for path, place in have.lines.items():
        found.lines[("mounts", path)] = place
    if have.shm is not None:
        found.resources["shm"] = have.shm
    if have.volumes:
        found.pod.setdefault("spec", {})["volumes"] = have.volumes
        _main(found)["volumeMounts"] = have.volume_mounts


def without_image(container: View, found: Piece, *, runs: bool = True) -> None:
    """Prepares the command to run on this machine directly: without the image, nothing can be mounted."""
    if found.image:
        why = "no container runtime (podman, docker) is here; the command runs in this Python environment"
        container.note("image", why)
    if runs and found.words is None and container.scope != "trainer" and "command" not in container:
        hint = "Write the container's `command`."
        container.mistake("command", "is missing, and without its image its own command is unknown", hint)
    if found.first:
        container.note("workingDir", "is a folder of the image; the command runs in the folder of the file")
    found.image, found.args, found.first = None, [], []
    if found.resources.pop("shm", None) is not None:
        container.ledger.note(container.at, "/dev/shm", "is the machine's own, as large as it is", Level.SAID)
    folders = {path: source.removesuffix(":ro") for path, source in found.mounts.items() if source != "empty"}
    for path, source in found.mounts.items():
        where = found.lines.get(("mounts", path), container.at)
        if source == "empty":
            container.ledger.note(where, path, "nothing can be mounted without an image")
        else:
            why = f"nothing can be mounted without an image: the command and its variables say {folders[path]} instead"
            container.ledger.note(where, path, why, Level.SAID)
    found.mounts = {}
    if found.words is not None:
        found.words = [expansion.moved(word, folders) for word in found.words]
    found.env = {name: expansion.moved(value, folders) for name, value in found.env.items()}
    known = found.variables.known
    found.variables.known = {name: expansion.moved(value, folders) for name, value in known.items()}


def _security(spec: View, container: View, found: Piece, target: Target) -> None:
    """Keys that reach beyond the pod go to the cluster, whose admin decides. Without a cluster they are refused."""
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.take(key) is True:
            _beyond(spec, key, target, found.pod.setdefault("spec", {}) if target.cluster else {}, True)
    for owner, of_pod in ((spec, True), (container, False)):
        view = owner.child("securityContext", "security")
        if of_pod:
            continue
        wanted: dict[str, Any] = {}
        for key in ("privileged", "allowPrivilegeEscalation"):
            if view.take(key) is True:
                _beyond(view, key, target, wanted, True)
        capabilities = view.take("capabilities")
        if capabilities is not None and not (
            isinstance(capabilities, Mapping) and set(capabilities) <= {"add", "drop"}
        ):
            view.mistake("capabilities", f"is {show(capabilities)}", "Choices: add, drop.")
        elif capabilities and capabilities.get("add"):
            _beyond(view, "capabilities", target, wanted, {"add": capabilities["add"]})
        if wanted:
            _main(found)["securityContext"] = wanted
    ports = container.take("ports")
    held = [
        port
        for port in (ports if isinstance(ports, list) else ())
        if isinstance(port, Mapping) and port.get("hostPort")
    ]
    if held:
        _beyond(container, "ports", target, _main(found) if target.cluster else {}, held)


def _beyond(view: View, key: str, target: Target, into: dict[str, Any], value: Any) -> None:
    if target.cluster:
        into[key] = value
        view.note(key, f"{_BEYOND}; the cluster's admin has to allow it", Level.SAID)
    else:
        view.note(key, f"{_BEYOND}; a file cannot ask for that here", Level.REFUSED)


def _placing(spec: View, found: Piece, target: Target) -> None:
    for key in _PLACED:
        value = spec.take(key)
        if not value or (key == "dnsPolicy" and value == "ClusterFirst"):
            continue
        if target.cluster:
            found.pod.setdefault("spec", {})[key] = value
        else:
            level = Level.SAID if key in ("tolerations", "imagePullSecrets") else Level.IGNORED
            spec.note(key, _NO_CLUSTER, level)
    for key, usual, why in (
        ("serviceAccountName", "default", "the cluster's admin says which account pods have"),
        ("serviceAccount", "default", "the cluster's admin says which account pods have"),
        (
            "schedulerName",
            "default-scheduler",
            "the cluster's own scheduler places pods, after Stoker's queue",
        ),
    ):
        if spec.take(key) not in (None, usual, ""):
            spec.note(key, why)


def _main(found: Piece) -> dict[str, Any]:
    """The training's container in the additions to its pods."""
    spec = found.pod.setdefault("spec", {})
    if "containers" not in spec:
        spec["containers"] = [{"name": MAIN}]
    main: dict[str, Any] = spec["containers"][0]
    return main


def note_timeout(ledger: Ledger, path: At, seconds: float, retries: int) -> None:
    if retries:
        why = f"applies to each attempt, of which there may be {retries + 1}"
        ledger.note(path, show_duration(seconds), why, Level.SAID)
