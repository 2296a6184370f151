"""The writer of saves in the background: this rank's agent, and the memory that it lends.

``agent`` is the worker's end of its agent's saver, ``pages`` what becomes of the memory here,
``schedule`` when the next save is due.
"""

__all__ = ["agent", "pages", "schedule"]
