"""``elaunch top``: one run on a terminal that stays open; it changes nothing.

==========  ===================================================================================
app.py      the screen: the tree on the left, the chosen thing on the right, and the keys
pages.py    what these screens show, read by the readers of the commands
tree.py     job, nodes and ranks as rows, the worst first
widgets.py  what draws such rows, those that are seen only, and a screen of lines: a log, stacks, …
==========  ===================================================================================

``app`` alone is asked for, by the command, and only then is textual imported.
"""

__all__ = ["app", "pages"]
