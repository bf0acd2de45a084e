"""Task directories of this machine and their launchers.

task_info          what is written for a task; pure
directories        task directories: made, archived, deleted
records            what the engine knows of its tasks, where no run can write
registry           the tasks there are, and the proof that one is gone
starter            starts a launcher
forkserver_client  the server's side of the fork server
terminator         follows tasks to the proof of their end, and ends them
watcher            changes in task directories: inotify and pidfds
"""
