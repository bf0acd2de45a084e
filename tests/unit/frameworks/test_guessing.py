"""The framework of a script is guessed from its imports."""

from __future__ import annotations

import pytest

from stoker.frameworks.guessing import Guess, guess

PYTHON = ["python", "train.py"]


def of(text: str, *, argv: list[str] | None = None, **files: str) -> Guess | None:
    tree = {"train.py": text, **{f"{name}.py": content for name, content in files.items()}}
    return guess(argv or PYTHON, tree.get)


@pytest.mark.parametrize(
    ("text", "framework", "why"),
    [
        ("import torch.distributed as dist", "torch", "torch.distributed"),
        ("from torch import distributed", "torch", "torch.distributed"),
        ("import torch\ntorch.distributed.init_process_group()", "torch", "torch.distributed"),
        ("import torch as t\nt.distributed.init_process_group()", "torch", "torch.distributed"),
        ("from torch.nn.parallel import DistributedDataParallel", "torch", "torch.nn.parallel"),
        ("import lightning as L", "torch", "lightning"),
        ("from accelerate import Accelerator", "torch", "accelerate"),
        ("import torch", "torch", "torch"),
        ("def main():\n    import torch", "torch", "torch"),
        (
            "import tensorflow as tf\ntf.distribute.MultiWorkerMirroredStrategy()",
            "tensorflow",
            "tensorflow.distribute",
        ),
        ("import jax\njax.distributed.initialize()", "jax", "jax.distributed"),
        ("import jax, tensorflow as tf\njax.distributed.initialize()", "jax", "jax.distributed"),
        ("import stoker\nstoker.jax_initialize()", "jax", "stoker.jax_initialize"),
        ("from mpi4py import MPI\nimport torch", "mpi", "mpi4py"),
        ("import horovod.torch as hvd\nimport torch", "horovod", "horovod"),
        ("from dask.distributed import Client", "dask", "dask.distributed"),
        ("import dask.array as da", "dask", "dask"),
    ],
)
def test_one_framework(text: str, framework: str, why: str) -> None:
    assert of(text) == Guess(framework, f"train.py imports {why}")


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed\nfrom dask.distributed import Client",
        "import tensorflow, jax",
        "from mpi4py import MPI\nimport horovod.torch",
    ],
)
def test_two_frameworks_give_no_guess(text: str) -> None:
    found = of(text)
    assert found is not None and found.framework is None
    assert " and " in found.why


@pytest.mark.parametrize("text", ["import os", "", "this is no python (", "\0", "import torchvision_like"])
def test_no_signs(text: str) -> None:
    assert of(text) is None


def test_imports_of_local_modules_count() -> None:
    assert of("from model import Net", model="import torch\n") == Guess("torch", "model.py imports torch")
    tree = {"app/train.py": "from app.parts import net", "app/parts/net.py": "from mpi4py import MPI"}
    assert guess(["python", "-m", "app.train"], tree.get) == Guess("mpi", "app/parts/net.py imports mpi4py")
    tree = {"src/train.py": "import net", "src/net.py": "import jax"}
    assert guess(["python", "src/train.py"], tree.get) == Guess("jax", "src/net.py imports jax")


def test_circular_imports_end() -> None:
    assert of("import a", a="import b", b="import a") is None


@pytest.mark.parametrize(
    ("argv", "framework", "name"),
    [
        (["torchrun", "train.py"], "torch", "torchrun"),
        (["/bin/sh", "-c", "OMP_NUM_THREADS=1 mpirun -np 4 ./solve"], "mpi", "mpirun"),
        (["/bin/sh", "-c", "exec horovodrun python train.py"], "horovod", "horovodrun"),
        (["accelerate", "launch", "train.py"], "torch", "accelerate"),
        (["python", "-m", "torch.distributed.run", "x.py"], "torch", "torchrun"),
    ],
)
def test_the_command_itself(argv: list[str], framework: str, name: str) -> None:
    assert guess(argv, {}.get) == Guess(framework, f"the command calls {name}")


def test_a_shell_line() -> None:
    argv = ["/bin/sh", "-c", "cd x && python -u train.py --lr 1"]
    assert of("import torch", argv=argv) == Guess("torch", "train.py imports torch")


def test_nothing_is_run(tmp_path: object) -> None:
    assert of("raise SystemExit\nimport jax") == Guess("jax", "train.py imports jax")
