"""Text from users or training code cannot control a terminal."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from typing import Any

import pytest

from stoker.cli.rendering import terminal

ATTACKS = {
    "title": "\x1b]0;owned\x07",
    "title, string terminator": "\x1b]2;owned\x1b\\",
    "title, 8 bit": "\x9d0;owned\x9c",
    "clear screen": "\x1b[2J\x1b[H",
    "cursor up and overwrite": "\x1b[1A\x1b[2Kall fine",
    "cursor, 8 bit": "\x9b2J",
    "answerback": "\x1b[6n\x1b[c\x05",
    "device control": "\x1bP$q\x1b\\",
    "clipboard": "\x1b]52;c;ZXZpbA==\x07",
    "hyperlink": "\x1b]8;;http://evil\x07click\x1b]8;;\x07",
    "unfinished sequence": "\x1b[31",
    "unfinished title": "\x1b]0;owned",
    "reset": "\x1bc",
    "charset": "\x1b(0\x0e",
    "alternate screen": "\x1b[?1049h",
    "keys redefined": '\x1b["x";13p',
    "bidi override": "\u202egnp.exe\u202c",
    "bidi isolate": "\u2066admin\u2069\u200f",
    "overwrite by carriage return": "secret\rpublic",
    "backspaces": "rm\b\bls",
    "bell": "\x07" * 5,
    "nul": "a\0b",
    "line separator": "a\u2028b\u2029c",
    "newline in a name": "a\nfake-1234  succeeded",
    "invisible tags": "a\U000e0041\U000e007f",
    "lone surrogate": "a\ud800b",
    "delete": "a\x7fb",
    "vertical tab": "a\x0bb\x0cc",
    "sgr": "\x1b[31mred",
}
FORBIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)
OURS = re.compile(r"\x1b\[[0-9;]*m")


def harmless(text: str, *, colors: bool = False) -> bool:
    left = OURS.sub("", text) if colors else text
    return "\x1b" not in left and not FORBIDDEN.search(left)


@pytest.mark.parametrize("name", ATTACKS)
def test_text_is_escaped(name: str) -> None:
    attack = ATTACKS[name]
    assert harmless(terminal.safe(attack))
    assert "\n" not in terminal.safe(attack)
    for line in terminal.safe_lines(attack):
        assert harmless(line)
    for colors in (False, True):
        shown = terminal.safe_log(attack, colors=colors)
        assert harmless(shown, colors=colors)
        if colors and OURS.search(shown):
            assert shown.endswith(terminal.RESET)


def test_random_bytes_are_escaped() -> None:
    seed = 20260115
    print(f"seed {seed}")
    dice = random.Random(seed)
    pieces = [*ATTACKS.values(), "plain", "é", "日本", "\x1b[", "\x1b", "m", "0;1", ";"]
    for _ in range(2000):
        text = "".join(dice.choice(pieces) for _ in range(dice.randrange(6)))
        text += bytes(dice.randrange(256) for _ in range(dice.randrange(12))).decode(
            "utf-8", "surrogateescape"
        )
        assert harmless(terminal.safe(text)), ascii(text)
        assert harmless(terminal.safe_log(text, colors=False)), ascii(text)
        assert harmless(terminal.safe_log(text, colors=True), colors=True), ascii(text)


def test_what_log_lines_look_like() -> None:
    assert terminal.safe_log("\x1b[32mok\x1b[0m done", colors=True) == "\x1b[32mok\x1b[0m done\x1b[0m"
    assert terminal.safe_log("\x1b[32mok\x1b[0m\tdone", colors=False) == "ok\tdone"
    assert terminal.safe_log("\x1b[A\x1b[2K50%|####|\r", colors=False) == "50%|####|"
    assert terminal.safe_log("bell\x07 \x1b]0;x\x07", colors=True) == "bell\\x07 \\x1b]0;x\\x07"
    assert terminal.safe("two\nlines\t\u202e") == "two\\nlines\\t\\u202e"


@pytest.mark.parametrize("tty", [None, 100])
def test_no_command_passes_an_attack_on(
    fake: Any, invoke: Any, make_run: Any, clock: float, tty: int | None
) -> None:
    evil = "".join(ATTACKS.values())
    checkpoint = {
        "id": evil,
        "name": evil,
        "step": 1,
        "size": 1,
        "kept": True,
        "created_at": 1.0,
        "how": evil,
    }
    attempt = {
        "number": 1,
        "state": evil,
        "cause": evil,
        "evidence": {"message": evil, "last_lines": [evil], "signal": evil},
        "node": evil,
        "gpus": [evil],
        "resumed_from": evil,
        "started_at": 1.0,
    }
    run = make_run(
        "digits-7f3k", "failed", reason=evil, tags=[evil], command=[evil], user=evil, cause=evil, project=evil
    )
    run |= {
        "attempts": [attempt],
        "checkpoints": [checkpoint],
        "warnings": [evil],
        "name": evil,
        "code": evil,
    }
    run["record"]["git"]["commit"] = evil
    run["job"]["resources"] = {"cpu": evil, "memory": evil, "gpu": evil}
    run["job"]["workers"] = 2
    fake.runs = [
        run,
        make_run(evil, "queued", place=1, reason=evil),
        make_run("x-1111", "running", attempts=[attempt]),
    ]
    fake.events["digits-7f3k"] = [{"t": 1.0, "kind": evil, "text": evil}]
    fake.why = {"run": evil, "state": evil, "text": evil, "hint": evil}
    fake.logs = [[{"task": evil, "attempt": 1, "stream": "stdout", "t": 1.0, "text": evil, "partial": False}]]
    fake.metrics = {
        "k": {"key": evil, "last": evil, "min": evil, "max": evil, "last_step": evil, "count": evil}
    }
    fake.points = {evil: [[1, 2.0, 1.0, 1]]}
    fake.nodes = [
        {
            "name": evil,
            "ready": True,
            "cpu": 1,
            "memory": 1,
            "isolation": {evil: evil},
            "gpus": [{"model": evil, "index": evil}],
        }
    ]
    fake.files = {evil.replace("/", "_").replace("\\", "_").replace("\0", ""): b""}
    fake.counts = {evil: 1}
    fake.unknown = [{"id": evil, "name": evil, "t": None, "tasks": [{"task": evil}]}]
    fake.lost = {"status": evil, "hint": evil}
    for argv in (
        ["ps"], ["ps", "--json"], ["show", "digits-7f3k"], ["show", "digits-7f3k", "--events"], ["why", "digits-7f3k"],
        ["logs", "digits-7f3k"], ["logs", "digits-7f3k", "--json"], ["metrics", "digits-7f3k", "--no-plot"], ["nodes"],
        ["wait", "digits-7f3k"], ["stop", "digits-7f3k"], ["suspend", "x-1111"], ["server", "status"],
        ["doctor"], ["backup", "forget", "--all"],
        ["show", evil], ["ps", evil], [evil], ["run", f"{evil}.py"], ["_complete", "show", ""],
        ["pull", "digits-7f3k", "--checkpoint", evil],
    ):  # fmt: skip
        result = invoke(*argv, tty=tty)
        assert harmless(result.out, colors=tty is not None), (argv, ascii(result.out))
        assert harmless(result.err, colors=tty is not None), (argv, ascii(result.err))


def test_errors_from_the_server_are_escaped(fake: Any, invoke: Any) -> None:
    evil = "".join(ATTACKS.values())
    fake.errors["GET", "/runs"] = (409, {"code": "conflict", "message": evil, "hint": evil, "details": {}})
    result = invoke("ps", tty=80)
    assert result.code == 1
    assert harmless(result.err, colors=True)


def test_colour_only_where_it_is_wanted(fake: Any, invoke: Any, make_run: Any, monkeypatch: Any) -> None:
    fake.runs = [make_run("digits-7f3k", "running")]
    assert "\x1b[" in invoke("ps", tty=80).out
    assert "\x1b[" not in invoke("ps").out
    assert "\x1b[" in invoke("ps", "--color", "always").out
    assert "\x1b[" in invoke("--color=always", "ps").out
    assert "\x1b[" not in invoke("--color", "never", "ps", tty=80).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in invoke("ps", tty=80).out
    assert "\x1b[" in invoke("ps", "--color", "always", tty=80).out


def test_widths() -> None:
    assert terminal.width("日本") == 4
    assert terminal.cut("日本語", 5) == "日本…"
    assert terminal.cut("plain", 5) == "plain"
    assert terminal.cut("plain text", 6) == "plain…"
    assert terminal.pad("é", 3) == "é  "


def test_a_c_locale_does_not_break_names(tmp_path: Any) -> None:
    import os
    import subprocess
    import sys

    script = "from stoker.cli.context import Context; ctx = Context.from_environment(); ctx.print('caf\\u00e9 \\u2026'); ctx.note('\\u65e5')"
    env = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "caf\\xe9 \\u2026\n"


def test_ctrl_c_interrupts_a_question_also_when_another_thread_gets_the_signal() -> None:
    reading, writing = os.pipe()
    done, rescued = threading.Event(), threading.Event()

    def rescue() -> None:
        """Without the wake-up descriptor the read would never return."""
        if not done.wait(20):
            rescued.set()
            os.write(writing, b"d\n")

    other = threading.Thread(target=rescue)
    other.start()
    interrupt = threading.Timer(0.2, signal.pthread_kill, (other.ident, signal.SIGINT))
    interrupt.start()
    with open(reading) as stream, pytest.raises(KeyboardInterrupt):
        terminal.read_line(stream)
    done.set()
    other.join()
    interrupt.join()
    os.close(writing)
    assert not rescued.is_set()
