"""Decisions. Pure.

task_phases     the phases of a task, and the table of what moves it from one to the next
outcome         how a body ended becomes a cause, and a cause becomes what follows for the run
failure_policy  what the end of one task means for its attempt
hold            how long a failed attempt is held (`keep_on_failure`)
"""
