"""``elaunch status`` of a job of several nodes, read from the store in which its agents meet.

``store`` opens it without taking part, ``view`` puts the plan beside each agent's record, ``watch``
reads again, ``page`` lays it out.
"""

__all__ = ["store", "view", "watch"]
