"""Ending at the same step on all ranks.

``preempt`` is ``should_preempt()``; ``agreement`` is one rank's part in agreeing, over the round's
store, on the call at which it returns True.
"""

__all__ = ["preempt"]
