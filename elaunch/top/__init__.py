"""``elaunch top``: one run on a terminal that stays open; it changes nothing.

==========  ===================================================================================
app.py      the screen: the tree on the left, the chosen thing on the right, and the keys
pages.py    what it shows, read by the readers of the commands: rows, pages, lines
widgets.py  what draws the rows, of which only those are drawn that are seen, and the lines
==========  ===================================================================================

``app`` alone is asked for, by the command, and only then is textual imported.
"""

__all__ = ["app", "pages"]
