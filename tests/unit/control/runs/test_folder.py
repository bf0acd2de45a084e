"""The working folder of a run, from one attempt or generation to the next."""

from __future__ import annotations

from stoker.spec.states import RunState
from stoker.task import layout
from stoker.testing.taskdir_suite import contents, tree_of
from support.control.driven import DONE, Driven

GANG = {"workers": 2, "retries": 3, "resources": {"cpu": 1}}


def shipped(server: Driven, **files: bytes) -> str:
    names = {name.replace("_", "."): data for name, data in files.items()}
    return tree_of(server.loop.context.blobs, {"train.py": b"train", **names})


def write(server: Driven, run: str, path: str, data: bytes, task: str = "worker-0") -> None:
    target = server.directory(run, task) / layout.CODE / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)


def folder(server: Driven, run: str, task: str = "worker-0") -> dict[str, bytes | str]:
    return contents(server.directory(run, task) / layout.CODE)


def test_the_next_attempt_starts_in_the_folder_as_it_was_left(server: Driven) -> None:
    run = server.submit(code=shipped(server), retries=1)
    write(server, run, "out/last.pt", b"epoch 1")
    server.kill_launcher(run)
    server.advance(5)
    assert server.row(run).attempt == 2
    assert folder(server, run) == {"train.py": b"train", "out/last.pt": b"epoch 1"}
    kept = server.row(run).folder
    assert kept is not None and (kept["files"], kept["newest"], kept["attempt"]) == (1, "out/last.pt", 1)
    (said,) = server.events(run, "restored")
    assert said.text.startswith(
        "attempt 2 goes on in the working folder of attempt 1: 1 file, newest out/last.pt, "
    )


def test_what_replaces_what_was_kept_frees_it(server: Driven) -> None:
    run = server.submit(code=shipped(server))
    write(server, run, "last.pt", b"epoch 1")
    server.kill_launcher(run)
    server.advance(5)
    first = server.row(run).folder
    write(server, run, "last.pt", b"epoch 2")
    server.kill_launcher(run)
    server.until(lambda: server.row(run).attempt == 3)
    second = server.row(run).folder
    assert first is not None and second is not None and first["digest"] != second["digest"]
    assert first["digest"] not in server.store.blob_roots() and second["digest"] in server.store.blob_roots()


def test_a_folder_that_changes_is_progress(server: Driven) -> None:
    """So the bound on losses without progress does not end a training that writes its own checkpoints."""
    run = server.submit(code=shipped(server))
    for number in range(25):
        write(server, run, "last.pt", b"epoch %d" % number)
        server.kill_launcher(run)
        server.until(lambda number=number: server.row(run).attempt == number + 2)
    assert server.state(run) is RunState.RUNNING


def test_a_damaged_file_is_not_restored_and_said(server: Driven) -> None:
    run = server.submit(code=shipped(server))
    blobs = server.loop.context.blobs
    write(server, run, "good.pt", b"good")
    write(server, run, "bad.pt", b"bad")
    server.stop(run)
    kept = server.row(run).folder
    assert kept is not None
    bad = next(file for file in blobs.tree(kept["digest"]).files if file.path == "bad.pt")
    where = blobs.path(bad.sha256)
    where.chmod(0o644)
    where.write_bytes(b"BAD")
    server.resume(run)
    server.advance(5)
    assert folder(server, run) == {"train.py": b"train", "good.pt": b"good"}
    assert "stored files of the working folder are damaged and not restored: bad.pt" in server.said(run)


def test_tasks_with_folders_of_their_own_start_again_from_the_files_of_all(server: Driven) -> None:
    run = server.submit(code=shipped(server), **GANG)
    write(server, run, "snapshot.pt", b"epoch 7")
    write(server, run, "same.log", b"worker-0")
    write(server, run, "same.log", b"worker-1", "worker-1")
    write(server, run, "only.txt", b"of worker-1", "worker-1")
    server.kill_launcher(run, "worker-1")
    server.until(lambda: server.attempt(run).generation == 2 and server.state(run) is RunState.RUNNING)
    server.advance(5)
    both = {"train.py": b"train", "snapshot.pt": b"epoch 7", "only.txt": b"of worker-1"}
    # What a lost launcher left is read too: its directory is on this machine.
    assert folder(server, run) == {**both, "same.log": b"worker-0"}
    assert folder(server, run, "worker-1") == {**both, "same.log": b"worker-1"}
    assert "tasks wrote different files under the same name: same.log" in server.said(run)


def test_a_run_that_wrote_nothing_keeps_nothing(server: Driven) -> None:
    server.otherwise = DONE
    run = server.submit(code=shipped(server))
    assert server.state(run) is RunState.SUCCEEDED
    assert server.row(run).folder is None
