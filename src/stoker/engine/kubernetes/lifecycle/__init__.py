"""Pods from their creation to the proof that they are gone.

create        an attempt's objects, each once
delete        ends pods with proof, and removes what is left
resize        other CPU and memory for a running pod
launcherless  tasks without a launcher (`launcher: none`)
pod_log       the log of a container without a launcher
"""
