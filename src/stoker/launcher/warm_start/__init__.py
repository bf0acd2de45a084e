"""Standby processes that have imported their framework.

pool          the standby processes of a body
standby       a main process that leaves a copy of itself
program_exit  the end of a program without the interpreter's teardown
env_check     whether code sets variables that libraries read at import
"""
