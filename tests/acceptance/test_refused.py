"""Complete checkpoints are kept, whatever they contain. Refused ones are reported and not deleted."""

from __future__ import annotations

import sys

from support.box import Box
from support.waiting import wait

WRITER = """
import os, sys
from stoker import checkpoint

place = os.environ["STOKER_CHECKPOINT_DIR"]

def renamed(name, files):
    folder = os.path.join(place, name + ".tmp")
    os.mkdir(folder)
    for path, text in files.items():
        with open(os.path.join(folder, path), "w") as file:
            file.write(text)
    os.rename(folder, os.path.join(place, name))

TEXTS = {
    "vocab.txt": "[PAD]\\n[UNK]\\n", "chat_template.jinja": "{% for m in messages %}{{ m }}{% endfor %}",
    "settings.toml": "[model]\\nwidth = 4\\n", "README.md": "[![badge](x)](y)\\n", "train.log": "[10:00] step 1\\n",
    "config.json": "{\\"width\\": 4}",
}
if sys.argv[1] == "whole":
    renamed("model-1", TEXTS)
    for name, text in TEXTS.items():
        checkpoint.save(name, text)
else:
    with open(os.path.join(place, "step-1.pt.tmp"), "wb") as file:
        file.write(b"PK\\x03\\x04 and no more")
    os.rename(os.path.join(place, "step-1.pt.tmp"), os.path.join(place, "step-1.pt"))
    renamed("step-2", TEXTS | {"config.json": "{\\"width\\": "})
print("trained")
"""


def test_whole_checkpoints_are_kept_and_refused_ones_are_told_and_left(box: Box) -> None:
    box.write("train.py", WRITER)
    whole = box.submit(sys.executable, "train.py", "whole")
    shown = box.ended(whole)
    assert (shown["state"], shown["warnings"]) == ("succeeded", [])
    names = {
        "model-1",
        "vocab.txt",
        "chat_template.jinja",
        "settings.toml",
        "README.md",
        "train.log",
        "config.json",
    }
    assert {one["name"] for one in shown["checkpoints"]} == names

    # Reported at the end, by the command that started the run.
    ended = box("run", sys.executable, "train.py", "torn")
    (refused,) = [run for run in box.client().runs(limit=10)["runs"] if run["id"] != whole]
    run = refused["id"]
    assert "warning: checkpoint step-1.pt is not offered: the zip archive is damaged" in ended.stderr
    assert "warning: checkpoint step-2 is not offered: step-2/config.json: not complete JSON" in ended.stderr

    # Reported by `show` and by `pull`.
    shown = box.json("show", run)
    assert (shown["state"], shown["checkpoints"]) == ("succeeded", [])
    left, *others = shown["warnings"]
    assert [text.partition(" is not offered: ")[0] for text in others] == [
        "checkpoint step-1.pt",
        "checkpoint step-2",
    ]
    assert left in box("show", run).stdout.replace("\n", " ")
    assert any(
        "2 checkpoints are not offered" in event["text"] for event in box.json("show", run, "--events")
    )
    pulled = box("pull", run, "--what", "checkpoints", code=3).stderr
    assert "2 checkpoints are not offered: step-1.pt (the zip archive" in pulled
    assert "2 checkpoints are not offered: step-1.pt (the zip archive" in box("pull", run, code=3).stderr
    assert f"hint: what attempt 1 wrote is left for 7 days in {box.home.tasks / run / '1.kept'}; " in pulled

    # It is kept in the reported place after the attempt's other files are gone, and after a server restart.
    path = box.home.tasks / run / "1.kept"
    assert str(path) in left
    wait(lambda: path.is_dir() and not (box.home.tasks / run / "1").exists(), bool)
    box.kill_server()
    assert box.json("show", run)["warnings"] == shown["warnings"]
    (kept,) = path.glob("worker-0/checkpoints/1")
    assert (kept / "step-1.pt").read_bytes() == b"PK\x03\x04 and no more"
    assert (kept / "step-2" / "vocab.txt").read_text() == "[PAD]\n[UNK]\n"
    assert not (box.home.tasks / whole).exists()


RETRIED = """
import os, sys

place, attempt = os.environ["STOKER_CHECKPOINT_DIR"], int(os.environ["STOKER_ATTEMPT"])
print("from", os.path.basename(os.environ.get("STOKER_RESUME_FROM", "the start")))
name = {"torn": "step-%d.pt", "whole": "step-%d.bin"}.get(sys.argv[attempt])
if name:
    path = os.path.join(place, name % attempt)
    with open(path + ".tmp", "wb") as file:
        file.write(b"PK\\x03\\x04 and no more")
        if sys.argv[attempt] == "whole":
            file.seek(0)
            file.write(b"step")
    os.rename(path + ".tmp", path)
sys.exit(1)
"""


def test_what_an_earlier_attempt_wrote_is_left_too(box: Box) -> None:
    """The refused checkpoint of an earlier attempt may be the only one."""
    box.write("train.py", RETRIED)
    ended = box("run", "--retries", "2", sys.executable, "train.py", "torn", "nothing", "torn", code=1)
    (run,) = [run["id"] for run in box.client().runs(limit=10)["runs"]]
    first, third = (box.home.tasks / run / f"{number}.kept" for number in (1, 3))
    assert (
        f"what attempt 3 wrote is left for 7 days in {third}, what attempt 1 wrote in {first}" in ended.stderr
    )
    names = ["1.kept", "3.kept"]
    wait(lambda: sorted(path.name for path in (box.home.tasks / run).iterdir()), lambda it: it == names)
    for number, path in ((1, first), (3, third)):
        assert (path / f"worker-0/checkpoints/1/step-{number}.pt").is_file()
    assert f"in {first}" in box("pull", run, "--what", "checkpoints", code=3).stderr

    # The first attempt writes a torn checkpoint, the last one writes none.
    box("run", "--retries", "1", sys.executable, "train.py", "torn", "nothing", code=1)
    other = next(run for run in box.client().runs(limit=10)["runs"] if run["id"] != run)["id"]
    left = box.json("show", other)["warnings"][0]
    assert left.endswith(f"what attempt 1 wrote is left for 7 days in {box.home.tasks / other / '1.kept'}")
    wait(lambda: [path.name for path in (box.home.tasks / other).iterdir()], lambda it: it == ["1.kept"])


def test_a_stored_checkpoint_that_was_damaged_since_is_told(box: Box) -> None:
    box.write("train.py", RETRIED)
    run = box.submit(sys.executable, "train.py", "whole", "nothing")
    (kept,) = box.ended(run)["checkpoints"]
    (damaged,) = [
        path
        for path in (box.home.blobs / "objects").rglob("*")
        if path.is_file() and path.read_bytes().startswith(b"step and")
    ]
    damaged.chmod(0o600)
    damaged.write_bytes(b"STEP" + damaged.read_bytes()[4:])
    box("resume", run)
    shown = box.ended(run)
    (line,) = shown["warnings"]
    assert line.startswith(f"checkpoint {kept['name']} is not offered: what was stored of it is damaged: ")
    assert "from the start" in box("logs", run, "--attempt", "2").stdout
