"""What a body prints, uses, and whether it hangs.

output_log     the log of a task, within a budget
log_redaction  removes secrets from the output
framing        output of a pipe to framed lines; pure
sampler        usage over time, and the watchdog without cgroups
cgroup_usage   usage and limits from the cgroup, else /proc
gpu_usage      GPUs by NVML through ctypes
shared_memory  memory that no process maps
hang_detector  silence of a body, and what its processes do then
"""
