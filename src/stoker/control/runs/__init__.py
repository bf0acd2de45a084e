"""One step of a run: what is done when something may have changed.

reconcile    Reconciler: the step itself
task_reader  reads what is new in tasks, and how their bodies ended
recorder     what was read becomes changes of rows
shutdown     tells tasks to stop
resize       other CPU and memory for a run
hang         whether a whole world is silent
debug_hold   failed attempts that are held for `stoker shell`
cleanup      removes what ended attempts left on engines
"""
