"""Records how real libraries write checkpoints, as lists of file operations that tests replay.

    python -m venv corpus-env
    corpus-env/bin/pip install -r requirements/corpus.in
    python tests/corpus/record.py --python corpus-env/bin/python [WRITER...]

Needs strace. Each writer of `writers.py` and `model_writers.py` runs under it; what it did to files in its checkpoint directory becomes
`traces/WRITER.json`: {"writer", "versions", "blobs", "ops"}. Offsets of writes are made explicit, names are
relative to the checkpoint directory. Temporary files elsewhere that end up in it are named `@/...`, other
operations elsewhere are left out. An operation is a list:

    ["open", id, path, flags]   flags: letters out of w (write) c (create) x (exclusive) t (truncate) a (append)
    ["write", id, offset, blob] offset -1: at the end
    ["truncate", id, size]      ["truncate-path", path, size]
    ["close", id]               ["rename", from, to]      ["unlink", path]
    ["mkdir", path]             ["rmdir", path]           ["symlink", target, path]
    ["done", names]             the call that writes these checkpoints has returned

Blobs are base64 of zlib.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TRACES = HERE / "traces"
MARK = "/stoker-corpus-mark/"
CALLS = (
    "open,openat,creat,write,writev,pwrite64,pwritev,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,"
    "rmdir,ftruncate,truncate,close,lseek,dup,dup2,dup3,fcntl,mmap,copy_file_range,sendfile,fallocate,link,linkat,"
    "symlink,symlinkat,access,faccessat,faccessat2,clone,clone3,read,pread64"
)
PACKAGES = ("torch", "lightning", "safetensors", "h5py", "numpy", "tensorflow-cpu", "keras", "transformers",
            "orbax-checkpoint", "jax", "accelerate", "peft", "diffusers", "sentence-transformers", "scikit-learn", "joblib",
            "xgboost", "lightgbm", "onnx", "flax", "spacy")  # fmt: skip
LIMIT = 200_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", required=True, help="a Python that has the libraries of requirements/corpus.in"
    )
    parser.add_argument("writers", nargs="*", help="default: all")
    arguments = parser.parse_args()
    sys.path.insert(0, str(HERE))
    from writers import WRITERS

    versions = installed(arguments.python)
    TRACES.mkdir(exist_ok=True)
    for name in arguments.writers or WRITERS:
        # Some writers use the directory for temporary files, which may or may not be on the same disk.
        elsewhere = "/dev/shm" if name.endswith("_across") else None
        with (
            tempfile.TemporaryDirectory() as directory,
            tempfile.TemporaryDirectory(dir=elsewhere) as outside,
        ):
            lines = strace(arguments.python, name, Path(directory), outside)
            ops, blobs = Parser(str(Path(directory) / "c"), outside).parse(lines)
        text = json.dumps(
            {"writer": name, "versions": versions, "ops": ops, "blobs": blobs}, separators=(",", ":")
        ).replace("],[", "],\n[")
        if directory in text or outside in text or len(text) > LIMIT:
            raise SystemExit(
                f"{name}: the trace names this machine's paths, or has {len(text)} bytes of {LIMIT}"
            )
        (TRACES / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(f"{name}: {len(ops)} operations, {len(text)} bytes", flush=True)


def installed(python: str) -> dict[str, str]:
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    return dict(json.loads(subprocess.check_output([python, "-c", code, *PACKAGES])))


def strace(python: str, writer: str, directory: Path, outside: str) -> list[str]:
    target, output = directory / "c", directory / "strace.out"
    target.mkdir()
    command = ["strace", "-f", "-qq", "-xx", "-s", "100000000", "-e", f"trace={CALLS}", "-e", "signal=none"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(directory), "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3",
                   "KERAS_BACKEND": "tensorflow", "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore",
                   "OMP_NUM_THREADS": "1", "TMPDIR": outside, "HF_HUB_OFFLINE": "1",
                   "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
    subprocess.run(
        [*command, "-o", str(output), python, str(HERE / "writers.py"), writer, str(target)],
        check=True, env=environment, cwd=directory, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return output.read_text(encoding="latin-1").splitlines()


class Parser:
    """Turns strace's output into operations. Follows the threads of one process; its children are passed over."""

    def __init__(self, root: str, outside: str) -> None:
        self.roots = {root + "/": "", outside + "/": "@/"}
        self.contents: dict[str, bytearray] = {}
        """Of the files written so far: a copy by the kernel does not show its bytes."""
        self.ops: list[list[Any]] = []
        self.blobs: list[str] = []
        self.known: dict[bytes, int] = {}
        self.files: dict[int, dict[str, Any]] = {}
        self.sources: dict[int, dict[str, Any]] = {}
        """Descriptors for reading."""
        self.threads: set[str] = set()
        self.unfinished: dict[str, str] = {}
        self.count = 0

    def parse(self, lines: list[str]) -> tuple[list[list[Any]], list[str]]:
        for line in lines:
            pid, _, rest = line.partition(" ")
            rest = rest.strip()
            if not self.threads:
                self.threads.add(pid)
            if pid not in self.threads:
                continue
            if rest.endswith("<unfinished ...>"):
                self.unfinished[pid] = rest[: -len("<unfinished ...>")]
                continue
            resumed = re.match(r"<\.\.\. \w+ resumed>(.*)$", rest)
            if resumed:
                rest = self.unfinished.pop(pid) + resumed.group(1)
            found = re.match(r"(\w+)\((.*)\)\s+= (-?\w+)", rest)
            if found and not found.group(3).startswith("-"):
                self.call(found.group(1), split(found.group(2)), int(found.group(3), 0))
            elif found and found.group(1).startswith(("access", "faccess")):
                self.mark(found.group(2))
        return self.relevant(), self.blobs

    def relevant(self) -> list[list[Any]]:
        """Without temporary files that never got anywhere."""
        wanted = {op[1] for op in self.ops if op[0] == "rename"}
        dropped: set[int] = set()
        kept = []
        for op in self.ops:
            names = [arg for arg in op[1:] if isinstance(arg, str) and arg.startswith("@/")]
            if names and not wanted.issuperset(names):
                dropped.update([op[1]] if op[0] == "open" else [])
            elif not (op[0] in ("write", "close", "truncate") and op[1] in dropped):
                kept.append(op)
        used = sorted({op[3] for op in kept if op[0] == "write"})
        self.blobs = [self.blobs[number] for number in used]
        return [[*op[:3], used.index(op[3])] if op[0] == "write" else op for op in kept]

    def mark(self, arguments: str) -> None:
        path = next((text(a) for a in split(arguments) if a.startswith('"')), "")
        if path.startswith(MARK):
            self.ops.append(["done", json.loads(path[len(MARK) :])])

    def call(self, name: str, args: list[str], result: int) -> None:
        if name.startswith("clone"):
            if "CLONE_THREAD" in " ".join(args):
                self.threads.add(str(result))
            return
        handler = getattr(self, f"on_{name}", None)
        if handler is not None:
            handler(args, result)

    # -- descriptors -----------------------------------------------------------------------------------------

    def on_openat(self, args: list[str], fd: int) -> None:
        self.opened(args[1], args[2], fd)

    def on_open(self, args: list[str], fd: int) -> None:
        self.opened(args[0], args[1], fd)

    def on_creat(self, args: list[str], fd: int) -> None:
        self.opened(args[0], "O_WRONLY|O_CREAT|O_TRUNC", fd)

    def opened(self, path: str, flags: str, fd: int) -> None:
        self.files.pop(fd, None)
        self.sources.pop(fd, None)
        name = self.relative(path)
        if name is None:
            return
        if "O_TRUNC" in flags:
            self.contents[name] = bytearray()
        if not re.search("O_WRONLY|O_RDWR", flags):
            self.sources[fd] = {"name": name, "at": 0}
            return
        letters = {"O_CREAT": "c", "O_EXCL": "x", "O_TRUNC": "t", "O_APPEND": "a"}
        short = "w" + "".join(letter for flag, letter in letters.items() if flag in flags.split("|"))
        self.files[fd] = {"id": self.count, "at": 0, "append": "a" in short, "name": name}
        self.ops.append(["open", self.count, name, short])
        self.count += 1

    def on_close(self, args: list[str], _: int) -> None:
        file = self.files.pop(int(args[0]), None)
        if file is not None and file not in self.files.values():
            self.ops.append(["close", file["id"]])

    def on_dup(self, args: list[str], fd: int) -> None:
        self.on_close([str(fd)], 0)
        if int(args[0]) in self.files:
            self.files[fd] = self.files[int(args[0])]

    on_dup2 = on_dup3 = on_dup

    def on_fcntl(self, args: list[str], result: int) -> None:
        if "F_DUPFD" in args[1]:
            self.on_dup(args, result)

    def on_lseek(self, args: list[str], result: int) -> None:
        if int(args[0]) in self.files:
            self.files[int(args[0])]["at"] = result

    def on_read(self, args: list[str], result: int) -> None:
        if args[0].isdigit() and int(args[0]) in self.files:
            self.files[int(args[0])]["at"] += result

    # -- bytes -----------------------------------------------------------------------------------------------

    def on_write(self, args: list[str], result: int) -> None:
        file = self.files.get(int(args[0]))
        if file is not None:
            self.wrote(file, -1 if file["append"] else file["at"], data(args[1])[:result])
            file["at"] += result

    def on_writev(self, args: list[str], result: int) -> None:
        file = self.files.get(int(args[0]))
        if file is not None:
            joined = b"".join(data(part) for part in re.findall(r'iov_base=("[^"]*")', args[1]))
            self.wrote(file, -1 if file["append"] else file["at"], joined[:result])
            file["at"] += result

    def on_pwrite64(self, args: list[str], result: int) -> None:
        file = self.files.get(int(args[0]))
        if file is not None:
            self.wrote(file, int(args[3]), data(args[1])[:result])

    def wrote(self, file: dict[str, Any], offset: int, content: bytes) -> None:
        held = self.contents.setdefault(file["name"], bytearray())
        start = len(held) if offset < 0 else offset
        held.extend(bytes(max(0, start - len(held))))
        held[start : start + len(content)] = content
        if content not in self.known:
            self.known[content] = len(self.blobs)
            self.blobs.append(base64.b64encode(zlib.compress(content, 9)).decode())
        self.ops.append(["write", file["id"], offset, self.known[content]])

    def on_ftruncate(self, args: list[str], _: int) -> None:
        file = self.files.get(int(args[0]))
        if file is not None:
            self.ops.append(["truncate", file["id"], int(args[1])])

    def on_truncate(self, args: list[str], _: int) -> None:
        self.on_path("truncate-path", args[0], int(args[1]))

    def on_fallocate(self, args: list[str], _: int) -> None:
        if int(args[0]) in self.files and "KEEP_SIZE" not in args[1]:
            raise SystemExit("fallocate is not recorded yet")

    def on_sendfile(self, args: list[str], result: int) -> None:
        file = self.files.get(int(args[0]))
        if file is not None and result:
            at = int(args[2].split("]")[0].strip("[")) if args[2] != "NULL" else 0
            self.wrote(
                file, file["at"], bytes(self.contents[self.sources[int(args[1])]["name"]][at : at + result])
            )
            file["at"] += result

    def refuse(self, args: list[str], _: int) -> None:
        for argument in args:
            if argument.isdigit() and int(argument) in self.files:
                raise SystemExit(f"an operation that cannot be recorded was used on a checkpoint: {args}")

    on_pwritev = on_copy_file_range = refuse

    def on_mmap(self, args: list[str], _: int) -> None:
        if (
            "PROT_WRITE" in args[2]
            and "MAP_SHARED" in args[3]
            and args[4].isdigit()
            and int(args[4]) in self.files
        ):
            raise SystemExit("a checkpoint was written through memory, which strace cannot see")

    # -- names -----------------------------------------------------------------------------------------------

    def on_rename(self, args: list[str], _: int) -> None:
        self.renamed(args[0], args[1])

    def on_renameat(self, args: list[str], _: int) -> None:
        self.renamed(args[1], args[3])

    on_renameat2 = on_renameat

    def renamed(self, source: str, target: str) -> None:
        before, after = self.relative(source), self.relative(target)
        if (before is None) != (after is None):
            raise SystemExit(f"renamed from or to another directory: {text(source)} -> {text(target)}")
        if before is not None and after is not None:
            self.contents[after] = self.contents.pop(before, bytearray())
            self.ops.append(["rename", before, after])

    def on_unlink(self, args: list[str], _: int) -> None:
        self.on_path("unlink", args[0])

    def on_unlinkat(self, args: list[str], _: int) -> None:
        self.on_path("rmdir" if "AT_REMOVEDIR" in args[2] else "unlink", args[1])

    def on_mkdir(self, args: list[str], _: int) -> None:
        self.on_path("mkdir", args[0])

    def on_mkdirat(self, args: list[str], _: int) -> None:
        self.on_path("mkdir", args[1])

    def on_rmdir(self, args: list[str], _: int) -> None:
        self.on_path("rmdir", args[0])

    def on_link(self, args: list[str], _: int) -> None:
        if self.relative(args[-1 if len(args) == 2 else 3]) is not None:
            raise SystemExit("hard links are not recorded yet")

    on_linkat = on_link

    def on_symlink(self, args: list[str], _: int) -> None:
        name = self.relative(args[-1])
        if name is not None:
            self.ops.append(["symlink", text(args[0]), name])

    on_symlinkat = on_symlink

    def on_path(self, kind: str, path: str, *rest: Any) -> None:
        name = self.relative(path)
        if name is not None:
            self.ops.append([kind, name, *rest])

    def relative(self, argument: str) -> str | None:
        path = text(argument)
        for root, prefix in self.roots.items():
            if path.startswith(root):
                return prefix + path[len(root) :]
        return None


def split(arguments: str) -> list[str]:
    """Arguments of a call. Strings hold no commas: they are all in hexadecimal."""
    parts: list[str] = []
    depth = 0
    for piece in arguments.split(", "):
        if depth > 0:
            parts[-1] += ", " + piece
        else:
            parts.append(piece)
        if len(piece) < 2000 or piece[0] in "[{":
            depth += piece.count("[") + piece.count("{") - piece.count("]") - piece.count("}")
    return parts


def data(argument: str) -> bytes:
    return bytes.fromhex(argument.strip('"').replace("\\x", ""))


def text(argument: str) -> str:
    return data(argument).decode("utf-8", "surrogateescape") if argument.startswith('"') else ""


if __name__ == "__main__":
    main()
