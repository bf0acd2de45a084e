"""Other people's files: Kubernetes' and Kubeflow's manifests read into jobs, and jobs written as manifests. Pure.

    reading      text into documents, with a line for everything
    ledger       every key of a document is accounted for: honoured, harmless, or noted
    rows         the table of what becomes of each key; docs/foreign-files.md is held against it
    pods         a pod template into one piece of a job; expanding, mounting and amounts help
    single, kubeflow, mpi, trainer
                 the kinds
    translate    all of it: a file into translations
    locally      what changes where there is no image, or no cluster
    export       the other way round; export_kubeflow has the shapes that are not Kubernetes' own

What cannot be honoured is never passed over: it becomes a note with its path, its line and the reason, and whoever
submits decides. What could reach beyond a pod (the host, privileges) is not theirs to decide: see `Level`.
"""

from stoker.spec.interop.ledger import Level, Note
from stoker.spec.interop.reader import is_foreign
from stoker.spec.interop.translate import Reading, Target, Translation, translate

__all__ = ["Level", "Note", "Reading", "Target", "Translation", "is_foreign", "translate"]
