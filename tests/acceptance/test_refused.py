"""Checkpoints that are whole are kept, whatever lies in them; those that are refused are told, and are not thrown away."""

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

    # Told at the end, where the run was started.
    ended = box("run", sys.executable, "train.py", "torn")
    (refused,) = [run for run in box.client().runs(limit=10)["runs"] if run["id"] != whole]
    run = refused["id"]
    assert "warning: checkpoint step-1.pt is not offered: the zip archive is damaged" in ended.stderr
    assert "warning: checkpoint step-2 is not offered: step-2/config.json: not complete JSON" in ended.stderr

    # Told to whoever looks at it, and to whoever wants them.
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
    assert f"hint: what attempt 1 wrote is left for 7 days in {box.home.tasks / run / '1.kept'}; " in pulled

    # Left where it says, when all else of the attempt is gone, and after another server has begun.
    path = box.home.tasks / run / "1.kept"
    assert str(path) in left
    wait(lambda: path.is_dir() and not (box.home.tasks / run / "1").exists(), bool)
    box.kill_server()
    assert box.json("show", run)["warnings"] == shown["warnings"]
    (kept,) = path.glob("worker-0/checkpoints/1")
    assert (kept / "step-1.pt").read_bytes() == b"PK\x03\x04 and no more"
    assert (kept / "step-2" / "vocab.txt").read_text() == "[PAD]\n[UNK]\n"
    assert not (box.home.tasks / whole).exists()
