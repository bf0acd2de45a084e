"""The commands by name, group and one line each: all that `stoker --help` needs.

Kept apart from the commands and free of imports, so that the first page of help costs no more than starting
Python. A test compares every line here with the command it announces.
"""

from __future__ import annotations

GROUPS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "Train",
        (
            ("run", "run", "train: ship the code, start, show the logs, exit as it does"),
            ("submit", "submit", "start what a job file describes"),
            ("rerun", "rerun", "start a run's job again as a new run"),
            ("resume", "resume", "continue an ended or suspended run from its checkpoint"),
        ),
    ),
    (
        "Look",
        (
            ("ps", "ps", "list runs"),
            ("show", "show", "everything about one run"),
            ("logs", "logs", "what a run printed"),
            ("why", "why", "why a run waits or failed, and the fix"),
            ("metrics", "metrics", "a run's metrics, with small plots"),
            ("export", "export", "write a run as a manifest of Kubernetes or Kubeflow"),
            ("pull", "pull", "download what a run left: outputs, files, checkpoints, logs"),
            ("wait", "wait", "wait until runs have ended, exit as the training did"),
        ),
    ),
    (
        "Steer",
        (
            ("stop", "stop", "end runs: SIGTERM, the grace period, SIGKILL"),
            ("suspend", "suspend", "checkpoint, give back what it holds, keep it for later"),
            ("resize", "resize", "give a run more or less CPU and memory"),
            ("scale", "scale", "give an elastic run more or fewer workers"),
            ("shell", "shell", "open a shell in a run's task"),
            ("drill", "drill", "kill a run on purpose and see how it comes back"),
            ("rm", "rm", "remove ended runs; for a week they can be brought back"),
        ),
    ),
    (
        "Operate",
        (
            ("nodes", "nodes", "nodes and GPUs, and the runs on them"),
            ("top", "top", "what each run uses on which node, live"),
            ("cluster", "cluster", "the Kubernetes clusters runs can go to"),
            ("doctor", "doctor", "check this machine and say what to fix"),
            ("server", "server", "start, stop and look at your own server"),
            ("disk", "disk", "what takes the room in the home, and the largest runs"),
            ("prune", "rm", "empty the trash now"),
            ("backup", "backup", "copy the whole home, or restore it"),
            ("schema", "misc", "the JSON Schema of a job file, for editors"),
            ("completion", "misc", "completion for bash, zsh or fish"),
            ("version", "misc", "the version of this program"),
        ),
    ),
)
"""(title, ((command, module under stoker.cli.commands, summary), ...))"""

MODULES = {name: module for _, commands in GROUPS for name, module, _ in commands}

USAGE = "usage: stoker [--color auto|always|never] COMMAND [ARGS]..."


def top_help() -> str:
    """What `stoker --help` prints."""
    width = max(len(name) for name in MODULES)
    lines = [USAGE, "", "Trains your train.py: here, or on a cluster, with the same command."]
    for title, commands in GROUPS:
        lines += ["", f"{title}:"]
        lines += [f"  {name:<{width}}  {summary}" for name, _, summary in commands]
    lines += [
        "",
        "  stoker run train.py --epochs 5     train, and watch",
        "  stoker COMMAND --help              options and examples of one command",
    ]
    return "\n".join(lines) + "\n"
