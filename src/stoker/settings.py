"""The layout of a home, and the settings of its server.

`STOKER_HOME` names the home (default: the XDG data directory). Homes never touch each other: every path, lock, socket
and port below belongs to exactly one home.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from stoker.errors import SpecError


@dataclass(frozen=True)
class Home:
    """The layout of a home. Only names paths; creates nothing."""

    root: Path
    replica: str = ""
    """The name of one of several servers that share this home and a database; empty: the only server."""

    @classmethod
    def from_environment(cls) -> Home:
        replica = os.environ.get("STOKER_REPLICA", "")
        explicit = os.environ.get("STOKER_HOME")
        if explicit:
            return cls(Path(explicit).expanduser().absolute(), replica)
        base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        return cls(Path(base).expanduser().absolute() / "stoker", replica)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the server's files in the root. Any other file belongs to the user."""
        files = (self.config, self.token, self.server_record, self.database, self.ledger)
        more = (self.blobs, self.tasks, self.runs, self.secrets, self.setups, self.backups, self.engine)
        return tuple(path.name for path in (*files, *more, self.mirrors, self.cache))

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def token(self) -> Path:
        """0600; the bearer token of the embedded server."""
        return self.root / "token"

    @property
    def server_record(self) -> Path:
        """JSON: pid, start time, boot id, URL, version of the server that runs or ran last."""
        return self.root / "server.json"

    @property
    def server_lock(self) -> Path:
        """Locked (flock) by the server, or the replica of this name, while it lives."""
        return self.root / f"server{self._suffix}.lock"

    @property
    def server_log(self) -> Path:
        return self.root / f"server{self._suffix}.log"

    @property
    def _suffix(self) -> str:
        return f"-{self.replica}" if self.replica else ""

    @property
    def database(self) -> Path:
        return self.root / "stoker.db"

    @property
    def ledger(self) -> Path:
        """One line per acknowledged run, so that `backup restore` can name runs that a lost database knew."""
        return self.root / "ledger.jsonl"

    @property
    def blobs(self) -> Path:
        return self.root / "blobs"

    @property
    def tasks(self) -> Path:
        """tasks/RUN/ATTEMPT/TASK: the task directories of the local engine."""
        return self.root / "tasks"

    @property
    def runs(self) -> Path:
        """runs/RUN/...: what stays of a run for good: logs by attempt and task, outputs."""
        return self.root / "runs"

    @property
    def secrets(self) -> Path:
        """0700; secrets/RUN.json, 0600, deleted when the run is terminal."""
        return self.root / "secrets"

    @property
    def setups(self) -> Path:
        """setups/KEY: environments made by `setup:`, one per content of its inputs."""
        return self.root / "setups"

    @property
    def backups(self) -> Path:
        return self.root / "backups"

    @property
    def engine(self) -> Path:
        """State of the local engine: fork server socket, GPU and port locks."""
        return self.root / "engine"

    @property
    def identity(self) -> Path:
        """The home's name in the labels of its pods. With another name it would not find them again."""
        return self.engine / "home-id"

    @property
    def mirrors(self) -> Path:
        """mirror/CLUSTER/...: copies of the growing files in task directories of pods."""
        return self.root / "mirror"

    @property
    def cache(self) -> Path:
        """Caches of clients (file hashes). May be deleted at any time."""
        return self.root / "cache"


@dataclass(frozen=True)
class ServerSettings:
    """Where the server listens, and its database."""

    host: str = "127.0.0.1"
    """Loopback unless an operator chooses otherwise."""
    port: int = 0
    """0: a free port, recorded in server.json."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names accepted in the Host header, besides loopback."""
    cluster: str = ""
    """The cluster for runs that name none; empty: this machine."""
    database: str = field(default="", repr=False)
    """postgresql://...; empty: the SQLite file in the home. STOKER_DATABASE takes precedence. May hold a password."""
    lease: float = 15.0
    """Seconds of silence after which another server on the same database takes over."""


@dataclass(frozen=True)
class ImageSettings:
    """Registries that the server may read images from."""

    plain: tuple[str, ...] = ()
    """Registries without TLS, as HOST or HOST:PORT. Loopback is always allowed."""
    inside: tuple[str, ...] = ()
    """Hosts that may have loopback and link-local addresses."""
    ca_files: tuple[str, ...] = ()
    """Certificates to trust besides the system's."""


@dataclass(frozen=True)
class LocalSettings:
    """What runs may use of this machine. None: everything."""

    enabled: bool = True
    """False: nothing runs here, only on clusters. Tasks that run already go on."""
    cpu: float | None = None
    memory: int | None = None
    memory_reserve: float = 0.1
    """Share of physical memory reserved for the system, the server and other use of the machine."""
    isolation: str = "auto"
    """auto | none. `none` is for debugging the isolation itself."""


@dataclass(frozen=True)
class LogSettings:
    """Limits of one task's log."""

    budget: int = 1 << 30
    """Bytes kept per task: the first part and the newest. The middle is dropped, with a note."""
    segment: int = 8 << 20
    """Bytes per log file, the unit of dropping."""


@dataclass(frozen=True)
class ControlSettings:
    """Timing of the control loop, in seconds."""

    poll: float = 2.0
    """Interval of full checks of every live task. Changes are noticed at once by watching; this is the safety net."""
    retry_backoff: float = 1.0
    """Wait before a lost or failed attempt is repeated, from the second in a row without progress. Doubles each time."""
    retry_backoff_max: float = 300.0
    fault_retries: int = 20
    """Attempts lost in a row by no fault of the user before the run fails."""
    grow_after: float = 30.0
    """How long after the start of its world an elastic run may not grow."""
    grow_patience: float = 60.0
    """How long joining tasks wait for the world's next checkpoint before they interrupt it."""
    backup_every: float = 3600.0
    """Interval of automatic copies of the database. The last two are kept."""


@dataclass(frozen=True)
class Settings:
    home: Home
    server: ServerSettings = field(default_factory=ServerSettings)
    local: LocalSettings = field(default_factory=LocalSettings)
    images: ImageSettings = field(default_factory=ImageSettings)
    logs: LogSettings = field(default_factory=LogSettings)
    control: ControlSettings = field(default_factory=ControlSettings)

    @property
    def database(self) -> str | Path:
        """The database: a URL, or the file in the home."""
        return self.server.database or self.home.database

    @classmethod
    def load(cls, home: Home | None = None, *, environ: Mapping[str, str] = os.environ) -> Settings:
        """Defaults, replaced by `config.toml` in the home, replaced by the environment. Raises SpecError for unknown
        keys, with the choices."""
        home = home or Home.from_environment()
        raw: dict[str, Any] = {}
        if home.config.is_file():
            import tomllib  # lazy: every command needs a Home, few need the settings

            try:
                raw = tomllib.loads(home.config.read_text())
            except tomllib.TOMLDecodeError as exc:
                raise SpecError(f"{home.config}: {exc}", hint="Fix the file or move it away.") from exc
        groups = {
            "server": ServerSettings,
            "local": LocalSettings,
            "images": ImageSettings,
            "logs": LogSettings,
            "control": ControlSettings,
        }
        unknown = set(raw) - set(groups)
        if unknown:
            raise SpecError(
                f"{home.config}: unknown section {sorted(unknown)[0]!r}",
                hint=f"Sections: {', '.join(groups)}.",
            )
        settings = cls(
            home=home, **{name: _group(home, name, kind, raw.get(name, {})) for name, kind in groups.items()}
        )
        database = environ.get("STOKER_DATABASE")
        return (
            settings
            if not database
            else replace(settings, server=replace(settings.server, database=database))
        )


def _group(home: Home, name: str, kind: Any, values: Any) -> Any:
    if not isinstance(values, dict):
        raise SpecError(f"{home.config}: [{name}] must be a section")
    known = {f.name for f in fields(kind)}
    unknown = set(values) - known
    if unknown:
        raise SpecError(
            f"{home.config}: unknown key {sorted(unknown)[0]!r} in [{name}]",
            hint=f"Keys: {', '.join(sorted(known))}.",
        )
    for f in fields(kind):
        if f.name in values:
            problem = _problem(f.name, str(f.type), values[f.name])
            if problem:
                shown = f" = {values[f.name]!r}" if f.repr else ""
                raise SpecError(
                    f"{home.config}: {name}.{f.name}{shown}: {problem}",
                    hint="docs/operations.md describes the settings; leave the key out for its default.",
                )
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


_RANGES = {"memory_reserve": (0, 0.99), "port": (0, 65535), "fault_retries": (0, 1_000_000)}
"""Numbers that may be zero. All others must be positive."""


def _problem(key: str, kind: str, value: Any) -> str | None:
    """What is wrong with a value; None for a valid one. `kind` is the annotation of its field."""
    if kind.startswith("tuple"):
        good = isinstance(value, list) and all(isinstance(one, str) for one in value)
        return None if good else "must be a list of texts"
    if kind == "str":
        if not isinstance(value, str):
            return "must be a text in quotes"
        if key == "database" and value and "://" not in value:
            return "must be a URL: postgresql://user:password@host/name"
        return "must be auto or none" if key == "isolation" and value not in ("auto", "none") else None
    if kind == "bool":
        return None if isinstance(value, bool) else "must be true or false, without quotes"
    whole = kind.startswith("int")
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        return (
            "must be a whole number, without quotes or unit" if whole else "must be a number, without quotes"
        )
    low, high = _RANGES.get(key, (0, math.inf))
    if not low <= value <= high or (key not in _RANGES and value == 0) or value == math.inf:
        return f"must be from {low} to {high}" if key in _RANGES else "must be more than 0"
    return None
