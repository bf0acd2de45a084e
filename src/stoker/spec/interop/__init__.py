"""Other people's files: Kubernetes' and Kubeflow's manifests read into jobs, and jobs written as manifests. Pure.

reader           text into documents, with a line for everything
ledger           every key of a document is accounted for: honoured, harmless, or noted
rows             the table of what becomes of each key
reference        the tables of docs/foreign-files.md
pods             a pod template into one piece of a job
amounts          what a container asks for
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
writer           YAML as a person would write it

What cannot be honoured is never passed over: it becomes a note with its path, its line and the reason, and whoever
submits decides. What could reach beyond a pod (the host, privileges) is not theirs to decide: see `Level`.
"""

from stoker.spec.interop.ledger import Level, Note
from stoker.spec.interop.reader import is_foreign
from stoker.spec.interop.translate import Reading, Target, Translation, translate

__all__ = ["Level", "Note", "Reading", "Target", "Translation", "is_foreign", "translate"]
