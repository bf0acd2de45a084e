"""Rows of checkpoints from entries of a launcher's journal, with bounded values. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stoker.control.ingest import validation
from stoker.store.rows import CheckpointRow, PartRow, Point, TransferRow
from stoker.task.formats import StagedCheckpoint


def transfer_row(
    staged: StagedCheckpoint,
    *,
    run: str,
    attempt: int,
    source: str,
    offset: int = 0,
    length: int = 0,
    clean: validation.Clean = validation.same,
) -> TransferRow:
    """`source`: task and incarnation, see `source_name`. `offset`, `length`: of the entry in the journal."""
    return TransferRow(
        run=run,
        attempt=attempt,
        generation=staged.generation,
        task=source,
        number=staged.number,
        offset=offset,
        length=length,
        name=validation.text(staged.name, validation.NAME, clean),
        size=_claimed(staged),
        how=validation.text(staged.how, 20, clean),
        created_at=staged.at,
        written_at=staged.written_at,
        step=staged.step,
        metrics={
            validation.text(key, validation.NAME, clean): value for key, value in staged.metrics.items()
        },
    )


def checkpoint_row(row: TransferRow, digest: str, size: int) -> CheckpointRow:
    """For the only task of a run, once the bytes are in the blobs."""
    prefix = "" if row.task == "worker-0" else f"{row.task}-"
    return CheckpointRow(
        id=f"ck-{row.run}-{row.attempt}-{prefix}{row.number}",
        run=row.run,
        attempt=row.attempt,
        generation=row.generation,
        name=row.name,
        digest=digest,
        size=size,
        how=row.how,
        created_at=row.created_at,
        written_at=row.written_at,
        step=row.step,
        metrics=row.metrics,
    )


def part_row(row: TransferRow, task: str, digest: str, size: int) -> PartRow:
    """For one of several tasks."""
    return PartRow(
        run=row.run,
        attempt=row.attempt,
        task=task,
        number=row.number,
        generation=row.generation,
        name=row.name,
        digest=digest,
        size=size,
        how=row.how,
        created_at=row.created_at,
        written_at=row.written_at,
        step=row.step,
        metrics=row.metrics,
    )


def score(row: TransferRow, points: Sequence[Point], latest: Mapping[str, float]) -> TransferRow:
    """Adds metrics to the checkpoint. Metrics that it was saved with come first, then those reported for its step, then
    the newest ones reported before it was written."""
    values = dict(latest)
    values.update(
        {point.key: point.value for point in points if point.t <= (row.written_at or row.created_at)}
    )
    if row.step is not None:
        values.update({point.key: point.value for point in points if point.step == row.step})
    return replace(row, metrics={**values, **row.metrics})


def _claimed(staged: StagedCheckpoint) -> int:
    """Bytes of its files, as the launcher claims. The transfer detects a wrong size."""
    try:
        return max(0, min(sum(int(file["size"]) for file in staged.files), 1 << 62))
    except (TypeError, ValueError, KeyError):
        return 0
