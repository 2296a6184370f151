"""Every flag of ``elaunch run``: its names, its values, and which source decides it.

``table`` is the one table by which the command line, the variables and the job file are read,
checked, and shown in help and errors. ``answers`` says which of these sources decides each flag.
"""

__all__ = [
    "answers",
    "checkpoint",
    "flag",
    "given",
    "meeting",
    "rdzvconf",
    "table",
    "values",
    "variables",
]
