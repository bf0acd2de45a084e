"""Engines start, stop and observe tasks. They decide nothing.

base            the protocol of an engine
local/          tasks on this machine
kubernetes/     tasks in pods of a cluster
change_feed     hints that something changed, from an engine's threads to the control loop
port_allocator  ports for tasks that share this machine's address
"""
