"""Programs that the launcher brings along for bodies that need more than the user's own command.

An order whose command begins with `{helper}` names one of them; the rest are its arguments. They run as the body
does: as its user, in its environment, within its limits.

    remote-shell ADDRESS PORT        runs what others of this world ask for (MPI's workers)
    mpirun COMMAND...                runs the command over the workers, with whatever MPI is there
    horovodrun COMMAND...            the same, and every rank finds HOROVOD_*
    horovod-rank COMMAND...          one such rank
    mpi-agent HOST COMMAND...        what mpirun calls in place of ssh
    stacks FILE PID...               what these processes are doing

rsh_server    remote-shell
rsh_client    mpi-agent
rsh_protocol  what these two say to each other
mpirun        mpirun, horovodrun
horovod       horovod-rank
stacks        stacks
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Callable, List, Mapping, Optional, Sequence

MARK = "{helper}"
"""As the first word of a command."""
BAD_USAGE = 64
CANNOT = 127

_BEGIN = "import sys; sys.path.insert(0, {root!r}); from stoker.launcher.helpers import main; sys.exit(main(sys.argv[1:]))"


def command(argv: Sequence[str], bundle: Optional[str] = None) -> List[str]:
    """The command line for `argv`, which begins with MARK. `bundle`: a copy of Stoker's code that the body can read; None:
    this code itself."""
    root = bundle or os.path.dirname(
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    )
    return [sys.executable, "-I", "-S", "-c", _BEGIN.format(root=root), *argv[1:]]


def again(name: str, *argv: str) -> List[str]:
    """The command line of another helper, for use in a helper."""
    return command([MARK, name, *argv])


def become(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Execute another program in this process; returns an exit status only on failure."""
    # Python ignores SIGPIPE, and an ignored signal stays ignored after exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], list(argv), dict(environ))
    except OSError as exc:
        print(f"stoker: cannot run {argv[0]!r}: {exc.strerror}", file=sys.stderr)
    return CANNOT


def main(argv: List[str]) -> int:
    """Only the helper that is asked for is imported: each runs in a process of its own."""
    name = argv[0] if argv else ""
    if name not in _HELPERS:
        print(f"stoker: no such helper: {' '.join(argv[:1])!r}", file=sys.stderr)
        return BAD_USAGE
    helper: Callable[..., int] = importlib.import_module(f"{__name__}.{_HELPERS[name]}").main
    return helper(argv[1:], wrap=["horovod-rank"]) if name == "horovodrun" else helper(argv[1:])


_HELPERS = {
    "remote-shell": "rsh_server",
    "mpi-agent": "rsh_client",
    "mpirun": "mpirun",
    "horovodrun": "mpirun",
    "horovod-rank": "horovod",
    "stacks": "stacks",
}
