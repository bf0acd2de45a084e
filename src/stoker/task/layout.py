"""Names in a task directory. Who writes each file stands beside it.

task.json         engine      once, before the launcher starts: identity, limits, isolation (TaskInfo)
order.json        server      atomically replaced: what to do now (Order)
secrets.json      server      0600; name -> value; deleted when the run is terminal
journal.jsonl     launcher    append-only: starts, ends, checkpoints. fsync'ed where it must survive power loss
contact           courier     replaced on authenticated requests, at most every 10 s: keeps the lease (a counter)
status.json       launcher    atomically replaced: phase, usage, log counters (Status)
launcher.lock     launcher    flock'ed for as long as a launcher works on this directory
engine.json       engine      where earlier versions kept the local engine's record of the launcher process
log/NNNNNN.log    launcher    framed lines of all streams, in segments (formats.LogLine)
metrics/*.jsonl   training    one file per reporting process; one line per report
samples.jsonl     launcher    CPU, memory, GPU use over time
sdk/commits.jsonl training    the SDK says: this checkpoint is complete
sdk/stop          launcher    exists once the task was asked to stop (SDK should_stop)
code/             courier     the working directory, placed before the first order
checkpoints/G/    training    STOKER_CHECKPOINT_DIR of generation G
staged/NNNNNN/    launcher    a committed checkpoint, copied and verified, waiting to be carried away
staged/scan.jsonl launcher    what its scanner has seen, for the scanner after it
staged/.sums.jsonl server     hashes of what it took out of here and the launcher had not hashed
output/           training    STOKER_OUTPUT_DIR
stacks/G-N.txt    launcher    what the processes of a silent body of generation G were doing, the Nth time
.turns            engine      its lock has whoever may take CPU time from the training now (stoker.linux.idle_throttle): launcher or
                              server; one file with a name in each task of an attempt, where they are on one machine
.courier/         courier     content that is arriving, and what is about to be removed; where checkpoints/ and staged/
                              are volumes of their own, also in these

Where tasks share a volume for checkpoints, `checkpoints/` and `staged/` of each are in a part of it (`SharedPart`), beside
those of the same run. It outlives the task's machine.
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
CHECKPOINTS = "checkpoints"
STAGED = "staged"
SCAN = "staged/scan.jsonl"
SUMS = "staged/.sums.jsonl"
OUTPUT = "output"
STACKS = "stacks"
TURNS = ".turns"

DIRECTORIES = (LOG, METRICS, SDK, CODE, CHECKPOINTS, STAGED, OUTPUT)
LASTING = (CHECKPOINTS, STAGED)
"""What is in a task's part of a shared volume."""
SHARED = "shared"
"""By this name a courier is asked for what is on the shared volume: `shared/RUN/PART/staged/000001/last.pt`."""

_RUN = re.compile(r"[A-Za-z0-9_-]{1,63}")
_PART = re.compile(r"([0-9]{1,9})\.([A-Za-z0-9_-]{1,63})\.([0-9]{1,9})")


class SharedPart(NamedTuple):
    """Whose part of a shared volume it is."""

    run: str
    attempt: int
    task: str
    incarnation: int

    @property
    def name(self) -> str:
        return f"{self.run}/{self.attempt}.{self.task}.{self.incarnation}"

    @property
    def path(self) -> str:
        """As a courier is asked for it."""
        return f"{SHARED}/{self.name}"


def part_of(name: str) -> Optional[SharedPart]:
    """`RUN/ATTEMPT.TASK.INCARNATION`; None for a name that no task's part has."""
    run, _, rest = name.partition("/")
    found = _PART.fullmatch(rest)
    if found is None or not is_run(run):
        return None
    return SharedPart(run, int(found[1]), found[2], int(found[3]))


def is_run(name: str) -> bool:
    """Whether the parts of a run may be in a directory of this name."""
    return _RUN.fullmatch(name) is not None


def segment(number: int) -> str:
    """Path of one log segment."""
    return f"{LOG}/{number:06d}.log"


def checkpoints(generation: int) -> str:
    """Each generation writes into a fresh directory, so a late writer writes into a dead one."""
    return f"{CHECKPOINTS}/{generation}"


def staged(number: int) -> str:
    return f"{STAGED}/{number:06d}"


def stacks(generation: int, number: int) -> str:
    return f"{STACKS}/{generation}-{number}.txt"


def stacks_of(pid: int) -> str:
    """Within STACKS: where a process writes its own."""
    return f"pid-{pid}.txt"
