"""Brings up recorded attempts until their bodies run, and adopts tasks after a restart.

bringup           BringUp: asks the engine for tasks, waits until all are up, starts a generation
attempt_launcher  brings code, checkpoint and secrets into tasks, then their orders
attempt_spec      what the engine is asked for; pure
orders            makes orders from jobs and places; pure
world             members, addresses and ports of a world
gang_timeout      gangs of which only some tasks come up
adoption          adopts tasks that a restored database does not know
salvage           checkpoints of lost tasks on shared volumes
"""
