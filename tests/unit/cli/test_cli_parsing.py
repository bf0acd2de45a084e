"""The command line itself: reading it, help, mistakes, what is imported."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.cli import click_adapter, command_index, docs
from stoker.cli.errors import UsageMistake
from stoker.cli.load import load
from stoker.cli.params import Command, quick

LEAVES: dict[str, Command] = {}
for _name in command_index.MODULES:
    _command = load(_name)
    LEAVES |= {f"{_name} {sub}": command for sub, command in _command.subcommands.items()} or {
        _name: _command
    }


# -- help ------------------------------------------------------------------------------------------------------


def test_the_first_page_of_help_agrees_with_the_help_of_the_commands() -> None:
    for _, commands in command_index.GROUPS:
        for name, _, summary in commands:
            assert load(name).summary == summary
            assert f"  {name:<10}  {summary}\n" in command_index.top_help()
    assert all(len(line) <= 80 for line in command_index.top_help().splitlines())


@pytest.mark.parametrize("path", LEAVES)
def test_every_command_has_help(invoke: Any, capsys: Any, path: str) -> None:
    result = invoke(*path.split(), "--help")
    printed = capsys.readouterr().out
    assert result.code == 0
    assert printed.startswith(f"usage: stoker {path}")
    for option in LEAVES[path].options:
        assert option.hidden or option.names[0] in printed
    assert all(len(line) <= 100 for line in printed.splitlines())


@pytest.mark.parametrize("path", LEAVES)
def test_every_reading_command_has_json(path: str) -> None:
    if path in ("completion", "schema", "server logs"):
        return
    assert any("--json" in option.names for option in LEAVES[path].options)


def test_the_reference_page_is_up_to_date() -> None:
    page = Path(__file__).parents[3] / "docs/cli.md"
    assert page.read_text() == docs.cli_markdown(), "run: python -m stoker.cli.docs > docs/cli.md"


# -- the quick reader agrees with click ----------------------------------------------------------------------------


def by_click(command: Command, argv: list[str]) -> dict[str, Any] | None:
    try:
        return click_adapter.parse(command, f"stoker {command.name}", argv)
    except UsageMistake:
        return None


@pytest.mark.parametrize("path", LEAVES)
def test_quick_and_click_read_the_same(path: str) -> None:
    command = LEAVES[path]
    seed = 4711
    print(f"seed {seed}")
    dice = random.Random(f"{seed}{path}")
    names = [name for option in command.options for name in option.names]
    values = [
        "1",
        "x",
        "a=b",
        "10m",
        "-",
        "@last",
        "auto",
        "never",
        "",
        "--",
        "-5",
        "bash",
        "train.py",
        "outputs",
        "état",
    ]
    understood = 0
    for _ in range(500):
        words = []
        for _ in range(dice.randrange(5)):
            kind = dice.randrange(4)
            name = dice.choice(names)
            words += [
                [dice.choice(values)],
                [name],
                [name, dice.choice(values)],
                [f"{name}={dice.choice(values)}"],
            ][kind]
        found = quick(command, words)
        if found is not None:
            understood += 1
            assert found == by_click(command, words), words
    assert understood > 0


@pytest.mark.parametrize(
    "argv",
    [
        ["train.py", "--epochs", "5"],
        ["-d", "--name", "digits", "--cpu", "1", "--memory", "500Mi", "--", "python", "train.py", "-d"],
        ["--cpu=2", "--tag", "a", "--tag=b", "python", "-c", "print('--name')", "--", "x"],
        ["--", "true"],
        ["-q", "--", "--weird-program"],
    ],
)
def test_run_is_read_without_click(argv: list[str]) -> None:
    found = quick(load("run"), argv)
    assert found is not None
    assert found == by_click(load("run"), argv)


# -- mistakes ----------------------------------------------------------------------------------------------------

MISTAKES: list[tuple[str, str, str]] = [
    # what was typed | error | hint
    ("pss", "stoker has no command 'pss'", "Did you mean stoker ps?"),
    ("lgos", "stoker has no command 'lgos'", "Did you mean stoker logs?"),
    ("train.py", "'train.py' is a script, not a command", "To train it: stoker run train.py"),
    ("./run.sh", "'./run.sh' is a script, not a command", "To train it: stoker run ./run.sh"),
    ("xyzzy", "stoker has no command 'xyzzy'", "stoker --help lists the commands."),
    ("--gpu 1", "stoker has no option --gpu", "stoker --help lists the commands; options go after the command."),
    ("-x", "stoker has no option -x", "stoker --help lists the commands; options go after the command."),
    ("--color red ps", "--color: 'red' is not one of auto, always, never", "Usage: stoker --color never COMMAND"),
    ("PS", "stoker has no command 'PS'", "Did you mean stoker ps?"),
    ("list", "stoker has no command 'list'", "stoker ps lists runs."),
    ("ps --frob", "stoker ps has no option --frob", "stoker ps --help lists the options."),
    ("ps --limti 3", "stoker ps has no option --limti", "Did you mean --limit?"),
    ("ps -n", "-n needs a value", "Usage: stoker ps [OPTIONS] [FILTER...]"),
    ("ps -n three", "--limit: 'three' is not a whole number", "See stoker ps --help."),
    ("ps -n 0", "--limit: 0 is not at least 1", "For all runs: stoker ps -a"),
    ("ps -n -3", "--limit: -3 is not at least 1", "For all runs: stoker ps -a"),
    ("ps -a -n 3", "--all and --limit exclude each other", "Use one of them."),
    ("ps --filter", "--filter needs a value", "Usage: stoker ps [OPTIONS] [FILTER...]"),
    ("ps state=runing", "state='runing' is not a state", "Did you mean running?"),
    ("ps digits", "cannot understand the filter 'digits'", "Filters: state=running,queued  tag=baseline  name=digits  name~=dig  project=vision"),
    ("ps size=3", "cannot understand the filter 'size=3'", "Filters: state=running,queued  tag=baseline  name=digits  name~=dig  project=vision"),
    ("ps name=a name=b", "the filter name= is given twice", "Give it once."),
    ("ps --watch", "--watch needs a terminal", "For scripts: stoker wait RUN, or stoker ps --json in a loop."),
    ("ps --json=yes", "--json takes no value", "See stoker ps --help."),
    ("ps --color", "--color needs a value", "Usage: stoker ps [OPTIONS] [FILTER...]"),
    ("show", "stoker show needs RUN", "Usage: stoker show [OPTIONS] RUN"),
    ("show a b", "'b' is one word too many", "Usage: stoker show [OPTIONS] RUN"),
    ("show --follow a", "stoker show has no option --follow", "stoker show --help lists the options."),
    ("show a/b", "no run 'a/b'", "stoker ps -a lists all runs."),
    ("logs", "stoker logs needs RUN", "Usage: stoker logs [OPTIONS] RUN"),
    ("logs r --tail ten", "--tail: 'ten' is not a whole number", "See stoker logs --help."),
    ("logs r --tail -1", "--tail: -1 is negative", "For the last ten lines: --tail 10"),
    ("logs r --since yesterday", "--since: 'yesterday' is not a time", "Write 10m, 2h, 14:30 or 2026-01-31T14:30."),
    ("logs r --since 10x", "--since: '10x' is not a time", "Write 10m, 2h, 14:30 or 2026-01-31T14:30."),
    ("logs r --since 25:61", "--since: '25:61' is not a time", "Write 10m, 2h, 14:30 or 2026-01-31T14:30."),
    ("logs r --attempt 0", "--attempt: 0 is not an attempt", "Attempts count from 1; stoker show RUN lists them."),
    ("logs r --stdout --stderr", "--stdout and --stderr exclude each other", "Without either, both are shown."),
    ("logs r --folow", "stoker logs has no option --folow", "Did you mean --follow?"),
    ("logs r s", "'s' is one word too many", "Usage: stoker logs [OPTIONS] RUN"),
    ("logs r --task", "--task needs a value", "Usage: stoker logs [OPTIONS] RUN"),
    ("run", "stoker run needs a command", "As in: stoker run train.py --epochs 5"),
    ("run --cpu 1", "stoker run needs a command", "As in: stoker run train.py --epochs 5"),
    ("run trian.py", "there is no script 'trian.py' in '.'", "Did you mean train.py?"),
    ("run --gpus 1 train.py", "stoker run has no option --gpus", "Did you mean --gpu?"),
    ("run --mem 1Gi train.py", "stoker run has no option --mem", "Did you mean --memory?"),
    ("run --cpu", "--cpu needs a value", "Usage: stoker run [OPTIONS] [COMMAND...]"),
    ("run --json train.py", "--json goes with --detach", "An attached run prints the training's own output: use -d --json."),
    ("run --secret T=abc train.py", "--secret T: a value on the command line can be read by everybody on this machine", "Put it into the environment and write --secret T, or into a file: --secret T=@FILE"),
    ("run --secret NO_SUCH_SECRET train.py", "the secret NO_SUCH_SECRET is not in the environment", "export NO_SUCH_SECRET=..., or --secret NO_SUCH_SECRET=@FILE"),
    ("run --secret T=@nofile train.py", "--secret T: cannot read 'nofile': no such file or directory", "Check the path after the @."),
    ("run --workdir nowhere train.py", "the working directory 'nowhere' does not exist", "Set it with --workdir."),
    ("run --epochs 5 train.py", "stoker run has no option --epochs", "stoker run --help lists the options. Options of your own program go after its name."),
    ("run --exclusive=yes train.py", "--exclusive takes no value", "See stoker run --help."),
    ("submit", "stoker submit needs FILE", "Usage: stoker submit [OPTIONS] FILE"),
    ("submit a b", "'b' is one word too many", "Usage: stoker submit [OPTIONS] FILE"),
    ("submit job.yaml --json", "--json goes with --detach", "An attached run prints the training's own output: use -d --json."),
    ("submit job.yaml --set", "--set needs a value", "Usage: stoker submit [OPTIONS] FILE"),
    ("submit job.yaml --sett a=1", "stoker submit has no option --sett", "Did you mean --set?"),
    ("stop", "stoker stop needs RUN", "Usage: stoker stop [OPTIONS] RUN..."),
    ("stop --force r", "stoker stop has no option --force", "stoker stop --help lists the options."),
    ("stop --kil r", "stoker stop has no option --kil", "Did you mean --kill?"),
    ("stop ..", "no run '..'", "stoker ps -a lists all runs."),
    ("suspend", "stoker suspend needs RUN", "Usage: stoker suspend [OPTIONS] RUN"),
    ("suspend a b", "'b' is one word too many", "Usage: stoker suspend [OPTIONS] RUN"),
    ("resume", "stoker resume needs RUN", "Usage: stoker resume [OPTIONS] RUN"),
    ("resume a --detach", "stoker resume has no option --detach", "stoker resume --help lists the options."),
    ("resume a b", "'b' is one word too many", "Usage: stoker resume [OPTIONS] RUN"),
    ("rerun", "stoker rerun needs RUN", "Usage: stoker rerun [OPTIONS] RUN"),
    ("rerun r --json", "--json goes with --detach", "An attached run prints the training's own output: use -d --json."),
    ("wait", "stoker wait needs RUN", "Usage: stoker wait [OPTIONS] RUN..."),
    ("wait r --timeout soon", "--timeout: 'soon' is not a duration", "Write 90, 10m, 2h or 1h30m."),
    ("wait r --timeout -5", "--timeout: '-5' is not a duration", "Write 90, 10m, 2h or 1h30m."),
    ("wait r --timeout", "--timeout needs a value", "Usage: stoker wait [OPTIONS] RUN..."),
    ("why", "stoker why needs RUN", "Usage: stoker why [OPTIONS] RUN"),
    ("why a b", "'b' is one word too many", "Usage: stoker why [OPTIONS] RUN"),
    ("drill", "stoker drill needs RUN", "Usage: stoker drill [OPTIONS] RUN"),
    ("drill r --how gently", "--how: 'gently' is not one of process, launcher, server, preempt", "See stoker drill --help."),
    ("drill r --how", "--how needs a value", "Usage: stoker drill [OPTIONS] RUN"),
    ("drill r --timeout x", "--timeout: 'x' is not a duration", "Write 90, 5m or 1h."),
    ("metrics", "stoker metrics needs RUN", "Usage: stoker metrics [OPTIONS] RUN [KEY]"),
    ("metrics r k l", "'l' is one word too many", "Usage: stoker metrics [OPTIONS] RUN [KEY]"),
    ("metrics r --plto", "stoker metrics has no option --plto", "Did you mean --plot?"),
    ("pull", "stoker pull needs RUN", "Usage: stoker pull [OPTIONS] RUN"),
    ("pull r --what models", "--what: 'models' is not one of outputs, files, checkpoints, logs", "See stoker pull --help."),
    ("pull r --what logs --checkpoint c", "--checkpoint does not go with --what logs", "Leave --what out."),
    ("pull r -o", "-o needs a value", "Usage: stoker pull [OPTIONS] RUN"),
    ("pull r dir", "'dir' is one word too many", "Usage: stoker pull [OPTIONS] RUN"),
    ("nodes x", "'x' is one word too many", "Usage: stoker nodes [OPTIONS]"),
    ("nodes --jsn", "stoker nodes has no option --jsn", "Did you mean --json?"),
    ("doctor now", "'now' is one word too many", "Usage: stoker doctor [OPTIONS]"),
    ("server strat", "stoker server has no command 'strat'", "Did you mean stoker server start?"),
    ("server kill", "stoker server has no command 'kill'", "stoker server --help lists the commands."),
    ("server status now", "'now' is one word too many", "Usage: stoker server status [OPTIONS]"),
    ("server logs --tail -1", "--tail: -1 is negative", "For the last ten lines: --tail 10"),
    ("server start", "STOKER_URL names a server that is not this home's own", "Unset STOKER_URL to manage your own server."),
    ("backup", "", ""),
    ("backup mkae", "stoker backup has no command 'mkae'", "stoker backup --help lists the commands."),
    ("backup restore nowhere", "'{tmp}/nowhere' is not a backup", "stoker backup list shows those of this home."),
    ("backup restore", "this home has no backups", "Name one: stoker backup restore PATH. Without any: stoker server start --anew"),
    ("schema now", "'now' is one word too many", "Usage: stoker schema"),
    ("completion", "stoker completion needs SHELL", "Usage: stoker completion SHELL"),
    ("completion tcsh", "SHELL: 'tcsh' is not one of bash, zsh, fish", "See stoker completion --help."),
    ("version 2", "'2' is one word too many", "Usage: stoker version [OPTIONS]"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "error", "hint"), [mistake for mistake in MISTAKES if mistake[1]])
def test_mistakes(fake: Any, invoke: Any, tmp_path: Path, typed: str, error: str, hint: str) -> None:
    (tmp_path / "train.py").touch()
    result = invoke(*typed.split())
    assert result.err == f"error: {error}\n\nhint: {hint}\n".replace("{tmp}", str(tmp_path))
    assert result.out == ""
    assert result.code in (1, 2, 3)
    assert fake.requests == [], "a mistake must be found before the server is asked"


def test_no_arguments_print_help_and_fail(fake: Any, invoke: Any) -> None:
    result = invoke("backup")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("usage: stoker backup COMMAND [ARGS]...")
    assert invoke("backup", "--help").out == result.err


def test_text_that_is_not_utf8(fake: Any, invoke: Any) -> None:
    result = invoke("ps", "name=\udcff")
    assert (
        result.err == "error: 'name=\\udcff' is not UTF-8 text\n\nhint: Rename it, or put it into a script.\n"
    )


# -- completion --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["p"], ["ps", "pull", "prune"]),
        (["show", "dig"], ["digits-7f3k"]),
        (["show", ""], ["digits-7f3k", "@last"]),
        (["show", "digits-7f3k", ""], []),
        (["stop", "digits-7f3k", ""], ["digits-7f3k", "@last"]),
        (["server", "st"], ["start", "stop", "status"]),
        (["drill", "x", "--how", "p"], ["process", "preempt"]),
        (["logs", "--fo"], ["--follow"]),
        (["pull", "x", "-o", ""], ["__files__"]),
        (["run", "tr"], ["__files__"]),
        (["run", "train.py", "--da"], ["__files__"]),
        (["run", "--check"], ["--checkpoint-keep", "--checkpoint-best-metric", "--checkpoint-best-mode", "--checkpoint-world-size"]),
        (["submit", ""], ["__files__"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["nonsense", ""], []),
    ],
)  # fmt: skip
def test_completion(fake: Any, invoke: Any, make_run: Any, words: list[str], offered: list[str]) -> None:
    fake.runs = [make_run("digits-7f3k")]
    assert invoke("_complete", *words).out.splitlines() == offered


def test_completion_starts_no_server(invoke: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("STOKER_URL", raising=False)
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))
    assert invoke("_complete", "show", "").out == "@last\n"
    assert not (tmp_path / "home").exists()


def test_the_bash_completion_works_in_bash(fake: Any, make_run: Any, tmp_path: Path) -> None:
    fake.runs = [make_run("digits-7f3k")]
    script = (
        f'stoker() {{ "{sys.executable}" -m stoker.cli.main "$@"; }}\n'
        'eval "$(stoker completion bash)"\n'
        'COMP_WORDS=(stoker show di); COMP_CWORD=2; _stoker_complete; echo "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "digits-7f3k\n"


# -- what is imported ----------------------------------------------------------------------------------------------


def imported(*argv: str) -> set[str]:
    script = (
        "import sys; from stoker.cli.main import main\n"
        "code = main(sys.argv[1:]); print('\\n' + ' '.join(sys.modules)); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *argv], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_help_imports_almost_nothing() -> None:
    for argv in (["--help"], ["--version"]):
        found = imported(*argv)
        heavy = {
            "click",
            "rich",
            "pydantic",
            "http.client",
            "asyncio",
            "json",
            "pathlib",
            "dataclasses",
            "socket",
        }
        assert found & heavy == set()


def test_ps_and_run_import_no_heavy_thing(fake: Any, make_run: Any, tmp_path: Path) -> None:
    fake.runs = [make_run("digits-7f3k")]
    fake.logs = [[{"end": {"state": "succeeded", "exit_code": 0, "cause": "completed"}}]]
    heavy = {
        "click",
        "rich",
        "pydantic",
        "http.client",
        "asyncio",
        "ssl",
        "email",
        "yaml",
        "sqlalchemy",
        "fastapi",
    }
    assert imported("ps") & heavy == set()
    assert imported("run", "-w", str(tmp_path), "--cpu", "1", "--", "true") & heavy == set()
    assert imported("logs", "digits-7f3k") & heavy == set()


def test_a_closed_pipe_is_no_error(fake: Any, make_run: Any) -> None:
    fake.runs = [make_run(f"many-{n:04d}", reason="x" * 1000) for n in range(400)]
    command = [sys.executable, "-m", "stoker.cli.main", "ps", "-a"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141
