"""Turns a Kubernetes file into jobs: one translation for each object that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stoker.spec.interop import kubeflow, mpi, single, trainer
from stoker.spec.interop.assemble import Draft
from stoker.spec.interop.ledger import Ledger, Level, Note, View
from stoker.spec.interop.pods import Target
from stoker.spec.interop.reader import KINDS, Document, documents
from stoker.spec.job import Job

__all__ = ["Reading", "Target", "Translation", "translate"]

_KINDS: dict[str, Callable[[View, Draft, Target], Job | None]] = {
    "Pod": single.pod,
    "Job": single.job,
    "TFJob": kubeflow.tfjob,
    "PyTorchJob": kubeflow.pytorchjob,
    "JAXJob": kubeflow.jaxjob,
    "MPIJob": mpi.mpijob,
    "TrainJob": trainer.trainjob,
}


@dataclass(frozen=True)
class Translation:
    """One object and the job it became."""

    kind: str
    name: str
    line: int
    job: Job
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class Reading:
    """A whole file, in its order."""

    translations: tuple[Translation, ...]
    notes: tuple[Note, ...] = ()
    """Notes about objects of the file that are not run."""

    def of(self, level: Level) -> list[Note]:
        everything = [*self.notes, *(note for one in self.translations for note in one.notes)]
        return [note for note in everything if note.level is level]


def translate(data: bytes, *, source: str, target: Target) -> Reading:
    """Raises SpecError for mistakes in the file. What is not honoured is in the notes."""
    found, notes = [], []
    for document in documents(data, source):
        if document.kind in KINDS:
            found.append(_translated(document, target))
        else:
            why = "is not created; if the run needs it, apply it with kubectl first"
            notes.append(Note(document.kind, document.line, document.name, why))
    return Reading(tuple(found), tuple(notes))


def _translated(document: Document, target: Target) -> Translation:
    ledger = Ledger(document.source, document.marks)
    view = ledger.view(document.tree, document.at, "document")
    for key in ("apiVersion", "kind"):
        view.take(key)
    draft = Draft(ledger)
    draft.describe(view.child("metadata", "metadata"))
    job = _KINDS[document.kind](view, draft, target)
    notes = ledger.close()
    assert job is not None, "a kind that made no job has reported the reason"
    return Translation(document.kind, document.name.rstrip("-") or job.name, document.line, job, notes)
