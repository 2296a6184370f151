"""A run on a screen that stays open, in the browser (elaunch.dashboard) or in a terminal.

==========  ===================================================================================
logtail.py  the newest lines that fit a filter, and those that come
curves.py   what the script has reported, thinned to what a screen can show
==========  ===================================================================================
"""

__all__ = ["curves", "logtail"]
