"""The body of a task: setup, training processes, and their end.

execution          one order, as a state machine
spawn              starts a process: environment, fork, exec
folder_extras      links out of the working folder, empty folders
process_group      the main processes of a body
process_tree       finds and ends all processes of a body
exit_reason        how a body ended
setup_cache        `setup:`, once per content
build_env          builds the environment of a `setup:`, in a process of its own
container_env      a launcher inside a user's container
foreign_container  a body that is a container of its own
shell              a person in a task's place
"""
