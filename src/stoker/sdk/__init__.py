"""What training code may import: a few names, the standard library, nothing to install or set up.

    stoker.report(step=100, loss=0.25)        a point on the run's curves
    stoker.checkpoint.save("last.pt", data)   atomic, and kept by Stoker the moment it returns
    stoker.should_stop()                      True once the run was asked to stop
    stoker.params()                           the parameters a sweep chose for this run
    stoker.jax_initialize()                   jax.distributed.initialize(), for the world this process is in

A script that uses them runs unchanged outside Stoker: reports go nowhere, checkpoints into `./checkpoints`.

reporting       metrics
checkpoint      saving and finding checkpoints
run_info        params and should_stop
jax             jax_initialize
stacks          answers when a process that hangs is asked what it is doing
atomic          a file or directory in its place in one step
async_save      saves while the training goes on
writer_process  writes what async_save copied aside
archive         torch's zip archives
torch_state     a torch state as records of an archive
torch_shards    one rank's part of a sharded state
"""

from __future__ import annotations

from stoker.sdk import checkpoint, stacks
from stoker.sdk.jax import jax_initialize
from stoker.sdk.reporting import report
from stoker.sdk.run_info import params, should_stop

__all__ = ["checkpoint", "jax_initialize", "params", "report", "should_stop"]

stacks.arm()
