"""Everything that the command line prints.

terminal     what may reach a terminal, and how wide it is
units        sizes, durations and times
tables       tables, and the shapes in which runs are shown
run_details  `show`: one run in full
gang_tables  runs of several tasks: the table of tasks, the world
plot         curves of metrics
"""
