"""Every decision of the coordinator, pure.

``decide(view, now, rules) -> (step, reason)`` knows no thread, no clock and no store; a simulation
drives it through seeded schedules of faults. The other modules are its parts: who is there, is it
enough, may another round follow, in which order, from which checkpoint.
"""

__all__ = ["decide", "members", "view"]
