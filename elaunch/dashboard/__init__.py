"""``elaunch dashboard``: runs in the browser.

``serving`` opens the port and runs the server; ``guard`` refuses requests that are not the user's;
``app`` has the addresses, and pushes readings and lines to open pages. Nothing changes a run, and
all data come from the readers of the commands and of ``elaunch.views``.
"""

__all__ = ["serving"]
