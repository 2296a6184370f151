"""The commands that only read: a person sees a job, running or ended, and changes nothing.

============  =============================================================================
top.py        one job as a tree that stays open
status.py     running and recent jobs, one job on all nodes; also as it changes
logs.py       what ranks have printed, merged by time over ranks, rounds and nodes
stacks.py     where all ranks are; a flame graph of one of them
why.py        why a run has failed; what a code means
metrics.py    what a script has reported
dashboard.py  all of it in the browser, or for an OpenTelemetry collector
============  =============================================================================
"""

__all__ = ["dashboard", "logs", "metrics", "stacks", "status", "top", "why"]
