"""Every decision of one agent, pure: events go in, an action and its reason come out.

``table`` is the way in: what is done about each event in each phase, ``decide``. ``rounds``,
``nodes`` and ``requests`` have its cells; ``turn`` is what the loop makes of one event,
and the round that it begins. The loop does what an action says, and the reason becomes the log
line, the status and what tests assert.
"""

__all__ = ["actions", "events", "nodes", "state", "turn"]
