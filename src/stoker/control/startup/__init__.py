"""From the recorded intent to running bodies, and taking over after a restart.

bringup           BringUp: asks the engine for tasks, waits until all are up, starts a generation
attempt_launcher  what tasks get before their order: code, checkpoint, secrets; then the order
attempt_spec      what the engine is asked for; pure
orders            a job and its place become an order; pure
world             members, addresses and ports of a world
gang_timeout      gangs of which only some tasks come up
adoption          takes over tasks that a restored database does not know
salvage           checkpoints of lost tasks on shared volumes
"""
