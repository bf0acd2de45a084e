"""Decisions. Pure.

task_phases     the phases of a task, and the events that move it from one to the next
outcome         the cause of an ended attempt, and the next state of its run
failure_policy  what the end of one task means for its attempt
hold            how long a failed attempt is held (`keep_on_failure`)
"""
