"""From which checkpoint the next round starts.

Between two rounds the tree is dead. Then ``directory`` commits or clears what the last round has
left, and ``latest`` finds the newest complete checkpoint. Before the first round it looks whether
the directory is fit for use, so that a job that cannot save does not begin.
"""

__all__ = ["directory", "latest"]
