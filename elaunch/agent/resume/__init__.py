"""From which checkpoint the next round starts.

Between two rounds the tree is dead. Then ``directory`` commits or clears what the last round has
left, and ``latest`` finds the newest complete checkpoint. ``probe`` looks at the directory before
the first round, so that a job that cannot save does not begin.
"""

__all__ = ["directory", "latest", "probe"]
