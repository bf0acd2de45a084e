"""One step of a run, taken when something may have changed.

reconcile    Reconciler: the step itself
task_reader  reads what is new in tasks, and judges how their bodies ended
recorder     turns what was read into changes of rows
shutdown     tells tasks to stop
resize       changes a run's CPU and memory
folder       keeps the working folder of a run
hang         detects that a whole world hangs
debug_hold   holds failed attempts for `stoker shell`
cleanup      removes what the engines hold of ended attempts
"""
