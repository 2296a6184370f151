"""One round's workers, as the agent starts, signals and ends them.

The agent never forks a worker itself: its server does (``elaunch.server``), and ``server`` is the
agent's end of it. ``group`` puts together what a round's workers are started with: the store's
socket, the variables, the output channels, a directory for temporary files.
"""

__all__ = ["group", "links", "network", "server", "tempdir"]
