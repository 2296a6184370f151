"""Finding out that a round hangs, who hangs, and where.

``watchdog`` looks at the workers' progress at fixed times: at what the script reports, or at lines
that it prints (``progress``, ``loglines``). What it sees becomes a ``history``, and ``judge``
decides purely from that. ``stacks`` asks every worker where it is before the round is ended.
"""

__all__ = ["judge", "loglines", "report", "stackdump", "watch"]
