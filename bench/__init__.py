"""Stoker against peers and limits, on one machine, in one run. `python -m bench --help` shows the usage.

figures      numbers with their spread, and ratios
results      lines of the table, bars, results.json
report       the table as text and in docs/performance.md
timing       commands timed in turns
peers        installs the peers
keeper       ends every process that a peer starts
ours         a home, a server and clients to measure
slurm, ray_jobs                  peers that need a cluster of their own
simulated_server, load           a server full of simulated tasks, and an open loop of requests
states, state_ranks              saving torch states, of one process and of two, in the environment that has torch
ranks                            a data-parallel training, in the same environment
row01 to row13                   the rows
accelerator, accelerator_train   a trial on a machine with a GPU, apart from the rows
"""
