"""Ending at the same step on all ranks.

``preempt`` is ``should_preempt()``; ``agreement`` is one rank's part in agreeing on the call at
which it returns True, ``board`` what the ranks write to the round's store for that.
"""

__all__ = ["preempt"]
