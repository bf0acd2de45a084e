"""Detects code that sets environment variables which libraries read at import."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.launcher.warm_start.env_check import SCRIPTS, sets_environment


@pytest.mark.parametrize(
    ("text", "sets"),
    [
        ("import torch", False),
        ('rank = int(os.environ["RANK"])', False),
        ('if os.environ["MODE"] == "fast": pass', False),
        ('os.environ.get("OMP_NUM_THREADS")', False),
        ('os.environ["MASTER_PORT"] = "29500"', False),
        ("os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')", False),
        ('os.environ["OMP_NUM_THREADS"] = "1"', True),
        ("environ['CUDA_VISIBLE_DEVICES']='0'", True),
        ("os.environ[name] = value", True),
        ('os.environ.setdefault("TORCH_LOGS", "all")', True),
        ('os.environ.pop("LD_PRELOAD", None)', True),
        ("os.environ.update(more)", True),
        ("os.environ |= more", True),
        ("os.putenv('A', 'b')", True),
        ("load_dotenv()", True),
    ],
)
def test_of_one_script(tmp_path: Path, text: str, sets: bool) -> None:
    (tmp_path / "train.py").write_text(text)
    assert sets_environment([str(tmp_path / "train.py")]) is sets


@pytest.mark.parametrize(
    "line",
    [
        "import settings",
        "import os, settings as ours",
        "from settings import threads",
        "    from settings import threads",
        "from parts import (\n    net,\n    deep,\n)",
        "from parts.deep import x",
        "import parts.deep",
        "import parts.near",
    ],
)
def test_of_what_it_imports(tmp_path: Path, line: str) -> None:
    setting = 'import os\nos.environ["OMP_NUM_THREADS"] = "1"\n'
    for name in ("settings.py", "parts/deep.py", "other.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(setting)
    (tmp_path / "parts/__init__.py").write_text("")
    (tmp_path / "parts/near.py").write_text("from .deep import x")
    (tmp_path / "train.py").write_text(line)
    assert sets_environment([str(tmp_path / "train.py")])
    (tmp_path / "train.py").write_text("import torch")
    assert not sets_environment([str(tmp_path / "train.py")]), (
        "a script that does not import it is not affected"
    )


def test_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app").mkdir()
    (tmp_path / "app/__init__.py").write_text("")
    (tmp_path / "app/train.py").write_text("import torch")
    assert not sets_environment(["-m", "app.train"])
    (tmp_path / "app/__init__.py").write_text("import os; os.environ.clear()")
    assert sets_environment(["-m", "app.train"])


def test_of_code_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert sets_environment(["nowhere.py"])
    assert sets_environment(["-m", "installed.elsewhere"])


def test_of_more_code_than_is_read(tmp_path: Path) -> None:
    for number in range(SCRIPTS + 1):
        (tmp_path / f"m{number}.py").write_text("")
    (tmp_path / "train.py").write_text("\n".join(f"import m{number}" for number in range(SCRIPTS + 1)))
    assert sets_environment([str(tmp_path / "train.py")])
