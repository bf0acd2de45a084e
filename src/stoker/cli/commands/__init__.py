"""The commands, one module per command or small group. Each has `COMMANDS`: name -> declaration.

run      `run`: submit and watch
submit   `submit`: submit and return
ps       `ps`: the list of runs
show     `show`: one run in full
logs     `logs`: lines of a run
metrics  `metrics`: values and curves
top      `top`: usage now
why      `why`: why a run waits or failed
wait     `wait`: until a run is over
stop     `stop`, `kill`
rm       `rm`, `prune`: the trash
disk     `disk`: what takes the room
suspend  `suspend`: checkpoint and let go
resume   `resume`: a new attempt
rerun    `rerun`: the same job as a new run
resize   `resize`: more or less CPU and memory
scale    `scale`: more or fewer workers
pull     `pull`: outputs and checkpoints to this machine
drill    `drill`: hurt a run on purpose
shell    `shell`: into a task
export   `export`: a job as a manifest
nodes    `nodes`: the machines
cluster  `cluster`: the clusters that runs can go to
server   `server`: start, stop, status
backup   `backup`: create, restore, forget
doctor   `doctor`: what this machine offers
misc     `schema`, `completion`, `version`
"""
