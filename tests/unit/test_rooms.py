"""The docstring of each package of Stoker names each of its files, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "stoker"
ENTRY = re.compile(r"^(\w+/?) {2,}\S", re.MULTILINE)
"""`name  what it is for`; a package within has a slash after its name."""
NUMBERED = SOURCE / "store" / "migrations" / "versions"
"""One file for each schema, named by its number: what they are for is said once."""


def rooms() -> list[Path]:
    return sorted(found.parent for found in SOURCE.rglob("__init__.py") if found.parent != NUMBERED)


@pytest.mark.parametrize("room", rooms(), ids=lambda room: str(room.relative_to(SOURCE.parent)))
def test_the_docstring_of_a_package_names_each_of_its_files(room: Path) -> None:
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    named = ENTRY.findall(docstring)
    files = [found.stem for found in room.glob("*.py") if found.stem != "__init__"]
    packages = [f"{found.parent.name}/" for found in room.glob("*/__init__.py")]
    assert docstring.strip(), f"{room} does not say what it is for"
    assert sorted(named) == sorted(files + packages)
