"""Every decision of one agent, pure: events go in, an action and its reason come out.

``decide(state, event) -> (action, reason)`` knows no clock, no process and no file, so tests and a
reader can follow it row by row. ``decide`` is the way in; ``turn`` is what the loop makes of one
event, and the round that it begins; ``nodes``, ``requests`` and ``hang`` are its arms for the
coordinator's plans, for requests to end and to restart, and for hangs. The loop does what an action
says, and the reason becomes the log line, the status and what tests assert.
"""

__all__ = ["actions", "events", "nodes", "state", "turn"]
