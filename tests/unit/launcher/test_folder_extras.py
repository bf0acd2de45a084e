"""The launcher completes the working folder: empty folders and links out of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.launcher.process import folder_extras


def test_folders_and_links_are_made_once_and_by_several(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    for _ in range(2):
        folder_extras.make(str(tmp_path), ["logs", "a/b"], {"pkg/data": "/mnt/sets", "new/data": "/mnt/sets"})
    assert (tmp_path / "logs").is_dir() and (tmp_path / "a" / "b").is_dir()
    assert str((tmp_path / "pkg" / "data").readlink()) == "/mnt/sets"
    assert str((tmp_path / "new" / "data").readlink()) == "/mnt/sets"


def test_what_the_training_has_put_there_stays(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("kept")
    folder_extras.make(
        str(tmp_path), ["logs", "logs/deep", "other"], {"data": "/mnt/sets", "logs/link": "/x"}
    )
    assert (tmp_path / "logs").read_text() == "a file" and (tmp_path / "other").is_dir()
    assert (tmp_path / "data" / "x").read_text() == "kept"


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "", "a//b"])
def test_nothing_is_made_elsewhere(tmp_path: Path, path: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    with pytest.raises(ValueError, match="plain"):
        folder_extras.make(str(inside), [path], {})
    with pytest.raises(ValueError, match="plain"):
        folder_extras.make(str(inside), [], {path: "/mnt"})
    assert list(inside.iterdir()) == [] and list(tmp_path.iterdir()) == [inside]
