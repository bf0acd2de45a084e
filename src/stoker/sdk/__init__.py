"""What training code may import: four names, the standard library, nothing to install or set up.

    stoker.report(step=100, loss=0.25)        a point on the run's curves
    stoker.checkpoint.save("last.pt", data)   atomic, and kept by Stoker the moment it returns
    stoker.should_stop()                      True once the run was asked to stop
    stoker.params()                           the parameters a sweep chose for this run

A script that uses them runs unchanged outside Stoker: reports go nowhere, checkpoints into `./checkpoints`.
"""

from __future__ import annotations

from stoker.sdk import checkpoint
from stoker.sdk.reporting import report
from stoker.sdk.running import params, should_stop

__all__ = ["checkpoint", "params", "report", "should_stop"]
