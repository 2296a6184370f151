"""Finding out that a round hangs, who hangs, and where.

The one thread of ``sample`` asks the workers, whom ``living`` knows; it has their ``progress``, and
their collectives by ``recorders`` and ``trace``. What that means is found purely:
``hang`` judges the history of looks, ``collectives`` names the rank that all wait for,
``lateness`` the one that comes last. ``scene`` is where the others were when the first has failed,
and ``stacks`` asks every worker where it is before a round that hangs is ended.
"""

__all__ = [
    "collectives",
    "elsewhere",
    "hang",
    "living",
    "progress",
    "sample",
    "scene",
    "stackdump",
    "stacks",
]
