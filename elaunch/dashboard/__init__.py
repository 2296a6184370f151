"""``elaunch dashboard``: the views of a run as a page in the browser; it changes nothing.

``serving`` opens the port and runs the server; ``guard`` refuses requests that are not the user's;
``app`` has the addresses; ``feed`` pushes readings to open pages; ``summary`` is what the page of
a run shows. All data come from the readers of the commands.
"""

__all__ = ["serving"]
