"""Finding out that a round hangs, who hangs, and where.

``watch`` is all of it, as the loop sees it. The ``watchdog`` looks at the workers' ``progress`` at
fixed times: at what the script reports, or at lines that it prints. ``judge`` decides purely from
the history of that. ``stacks`` asks every worker where it is before the round is ended, or
looks at one for longer.
"""

__all__ = ["collectives", "elsewhere", "judge", "progress", "scene", "stackdump", "stacks", "watch"]
