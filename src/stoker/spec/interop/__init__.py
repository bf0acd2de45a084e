"""Reads manifests of Kubernetes and Kubeflow as jobs, and writes jobs as manifests. Pure.

reader           text into documents, with line numbers
ledger           every key of a document is accounted for: honoured, harmless, or noted
rows             the table of all keys and how each is handled
reference        the tables of docs/foreign-files.md
pods             a pod template into one piece of a job
amounts          resources of a container
mounts           volumes and mounts
expansion        `$(NAME)` in commands and variables
single           Pod, Job
kubeflow         TFJob, PyTorchJob, JAXJob
mpi              MPIJob
trainer          TrainJob
assemble         pieces into a job
translate        a file into translations
export           jobs as manifests
export_kubeflow  jobs as Kubeflow's kinds
writer           readable YAML

A key that cannot be honoured is never ignored silently. It becomes a note with its path, its line and the reason, and
the user decides. Keys that reach beyond a pod (the host, privileges) are not the user's decision: see `Level`.
"""

from stoker.spec.interop.ledger import Level, Note
from stoker.spec.interop.reader import is_foreign
from stoker.spec.interop.translate import Reading, Target, Translation, translate

__all__ = ["Level", "Note", "Reading", "Target", "Translation", "is_foreign", "translate"]
