"""Queue and engines: who starts where, and what engines show.

admission       decisions of the queue become attempts
places          what a task gets: its node, its ports; follows an engine's own choice
elastic         tasks join and leave a run
engine_watcher  EngineWatcher: nodes and tasks of one engine, and proofs that launchers are gone
node_health     nodes and GPUs on which too much failed
node_report     the nodes and their tasks, for people
unknown_tasks   tasks that engines show and the database does not know
"""
