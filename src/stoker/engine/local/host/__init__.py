"""This machine: what it has, and what it can enforce.

capacity   CPU and memory for runs
gpus       GPUs by NVML
cgroups    control groups: limits, one group per task
isolation  what can be enforced, found by trying
processes  processes, told apart for good
resize     other limits for a running task
"""
