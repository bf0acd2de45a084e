"""What Linux offers and Python does not: standard library only, Python 3.9, copied into other people's images.

syscalls       prctl, unshare, setns, mount and small reads of /proc, through ctypes
process        telling one process from another that later got the same number
descriptors    file descriptors that are closed at the end of a block
inotify        changes of directories
direct_io      reading and writing large files past the page cache
cgroup_paths   the control groups of a process, and where they lie in its file system
idle_throttle  background work that a training does not notice
"""
