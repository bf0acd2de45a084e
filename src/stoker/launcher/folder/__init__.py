"""Putting back files of the working folder that were torn when their writer was killed.

guard        FolderGuard: what settles while the training runs, what is repaired afterwards
units        which files are states of a training, and which belong together; pure
changes      what has happened to one unit, and when it may have settled; pure
aftermath    repairs the folder when all writers are dead, by the decisions
decisions    what becomes of a unit after a violent death, and which versions are made; pure
tree_watch   inotify on the whole folder
listing      the files of the folder and their states
versions     copies of settled states, at most two per unit
guard_state  what was seen, for the next guard
repair       the single steps: a version is put back, a torn file set aside
"""
