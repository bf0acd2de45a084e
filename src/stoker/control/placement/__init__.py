"""Queue and engines: admission, places, and what engines show.

admission       turns decisions of the queue into attempts
places          a task's node, resources and ports; follows an engine's own choice of a node
elastic         tasks join and leave a run
engine_watcher  EngineWatcher: nodes and tasks of one engine; finds that launchers are gone
node_health     nodes and GPUs on which too many tasks failed
node_report     the nodes and their tasks, for users
unknown_tasks   tasks that engines show and the database does not know
"""
