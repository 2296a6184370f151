"""Every flag of ``elaunch run``: its names, its values, and which source decides it.

``table`` is the one table by which the command line, the variables and the job file are read,
checked, and shown in help and errors. ``answers`` decides which of these sources counts.
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
