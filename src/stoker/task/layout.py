"""File names in a task directory, and the component that writes each file.

task.json         engine      once, before the launcher starts: identity, limits, isolation (TaskInfo)
order.json        server      atomically replaced: what to do now (Order)
secrets.json      server      0600; name -> value; deleted when the run is terminal
journal.jsonl     launcher    append-only: starts, ends, checkpoints. fsync'ed where it must survive power loss
contact           courier     replaced on authenticated requests, at most every 10 s: extends the lease (a counter)
status.json       launcher    atomically replaced: phase, usage, log counters (Status)
launcher.lock     launcher    flock'ed while a launcher works on this directory
engine.json       engine      where earlier versions kept the local engine's record of the launcher process
log/NNNNNN.log    launcher    framed lines of all streams, in segments (formats.LogLine)
metrics/*.jsonl   training    one file per reporting process; one line per report
samples.jsonl     launcher    CPU, memory, GPU use over time
sdk/commits.jsonl training    checkpoints that the SDK has completed
sdk/stop          launcher    exists once the task was asked to stop (SDK should_stop)
code/             courier     the working directory, placed before the first order
checkpoints/G/    training    STOKER_CHECKPOINT_DIR of generation G
staged/NNNNNN/    launcher    a committed checkpoint, copied and verified, ready for the server
staged/scan.jsonl launcher    the scanner's state, for the scanner of the next launcher
versions/NNNNNN/  launcher    a settled state of a file in code/, put back if a later write is torn
versions/folder.jsonl launcher what was seen of code/, for the next launcher
staged/.sums.jsonl server     hashes of files that the server took and the launcher had not hashed
output/           training    STOKER_OUTPUT_DIR
stacks/G-N.txt    launcher    stacks of the processes of a silent body of generation G, the Nth time
.turns            engine      the holder of its lock may take CPU time from the training (stoker.linux.idle_throttle): launcher or
                              server; tasks of one attempt on one machine have hard links to one file
.courier/         courier     content that is arriving, and files that are being removed; also in checkpoints/ and
                              staged/ where these are volumes of their own

The tasks of an attempt that has several share one working folder where they are on one machine: `.common/code`, beside
their directories. There `code` is a link to it. The server never follows the link: the engine knows the folder.

Where tasks share a volume for checkpoints, each task has its `checkpoints/` and `staged/` in a part of that volume
(`SharedPart`). The volume outlives the task's machine.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Optional

TASK = "task.json"
ORDER = "order.json"
SECRETS = "secrets.json"
CONTACT = "contact"
JOURNAL = "journal.jsonl"
STATUS = "status.json"
LOCK = "launcher.lock"
ENGINE = "engine.json"
LOG = "log"
METRICS = "metrics"
SAMPLES = "samples.jsonl"
SDK = "sdk"
COMMITS = "sdk/commits.jsonl"
STOP = "sdk/stop"
CODE = "code"
COMMON = ".common"
"""Beside the task directories of an attempt: what its tasks share on one machine."""
CHECKPOINTS = "checkpoints"
STAGED = "staged"
SCAN = "staged/scan.jsonl"
VERSIONS = "versions"
GUARD = "versions/folder.jsonl"
SUMS = "staged/.sums.jsonl"
OUTPUT = "output"
STACKS = "stacks"
TURNS = ".turns"

DIRECTORIES = (LOG, METRICS, SDK, CODE, CHECKPOINTS, STAGED, OUTPUT)
LASTING = (CHECKPOINTS, STAGED)
"""The directories in a task's part of a shared volume."""
SHARED = "shared"
"""First component of paths on the shared volume in requests to a courier: `shared/RUN/PART/staged/000001/last.pt`."""

_RUN = re.compile(r"[A-Za-z0-9_-]{1,63}")
_PART = re.compile(r"([0-9]{1,9})\.([A-Za-z0-9_-]{1,63})\.([0-9]{1,9})")


class SharedPart(NamedTuple):
    """The part of a shared volume that belongs to one incarnation of a task."""

    run: str
    attempt: int
    task: str
    incarnation: int

    @property
    def name(self) -> str:
        return f"{self.run}/{self.attempt}.{self.task}.{self.incarnation}"

    @property
    def path(self) -> str:
        """Its path in requests to a courier."""
        return f"{SHARED}/{self.name}"


def part_of(name: str) -> Optional[SharedPart]:
    """`RUN/ATTEMPT.TASK.INCARNATION`; None for a name that no task's part has."""
    run, _, rest = name.partition("/")
    found = _PART.fullmatch(rest)
    if found is None or not is_run(run):
        return None
    return SharedPart(run, int(found[1]), found[2], int(found[3]))


def is_run(name: str) -> bool:
    """Whether this can be the name of a run's directory on a shared volume."""
    return _RUN.fullmatch(name) is not None


def segment(number: int) -> str:
    """Path of one log segment."""
    return f"{LOG}/{number:06d}.log"


def checkpoints(generation: int) -> str:
    """Each generation has a new directory, so a late writer of an old generation cannot change a new one's files."""
    return f"{CHECKPOINTS}/{generation}"


def staged(number: int) -> str:
    return f"{STAGED}/{number:06d}"


def version(number: int) -> str:
    return f"{VERSIONS}/{number:06d}"


def stacks(generation: int, number: int) -> str:
    return f"{STACKS}/{generation}-{number}.txt"


def stacks_of(pid: int) -> str:
    """Within STACKS: the file into which a process writes its own."""
    return f"pid-{pid}.txt"
