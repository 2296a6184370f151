"""The writers of this rank's saves in the background: its agent, or threads of its own process.

``choose`` decides, ``agent`` is the worker's end of its agent's saver, ``local`` does the same
without an agent, from this process's own memory.
"""

__all__ = ["choose", "pages"]
