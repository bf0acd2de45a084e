"""The pages on parallel training show all examples, with their current code."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs/parallel.md", *sorted((ROOT / "docs/parallel").glob("*.md"))]
BLOCK = re.compile(r"<!-- (examples/\S+) -->\n```(?:python|yaml)\n(.*?)\n```", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_in_the_pages_is_that_of_the_examples(page: Path) -> None:
    text = page.read_text()
    found = BLOCK.findall(text)
    assert len(found) == len(re.findall(r"^```(?:python|yaml)$", text, re.MULTILINE)), "a block names no file"
    for path, block in found:
        lines = (ROOT / path).read_text().splitlines()
        length = len(block.splitlines())
        windows = (lines[at : at + length] for at in range(len(lines) - length + 1))
        assert any(textwrap.dedent("\n".join(window)) == block for window in windows), (
            f"not in {path}:\n{block}"
        )


def test_every_example_is_in_the_table() -> None:
    table = PAGES[0].read_text()
    folders = sorted(path.parent for path in (ROOT / "examples/parallel").glob("*/stoker.yaml"))
    assert len(folders) > 8
    for folder in folders:
        assert f"[{folder.name}](../{folder.relative_to(ROOT)}/train.py)" in table


def test_every_page_says_when_and_what_happens_when_a_worker_dies() -> None:
    for page in PAGES:
        text = page.read_text().lower()
        assert "when a worker dies" in text or "a worker that dies" in text or "a worker dies" in text, page
        assert "use it" in text or page == PAGES[0], page
        assert "not" in text, page
