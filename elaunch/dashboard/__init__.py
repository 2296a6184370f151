"""``elaunch dashboard`` and ``elaunch otlp``: runs in the browser and for a collector.

``serving`` opens the port and runs the server; ``guard`` refuses requests that are not the user's;
``app`` has the addresses, and pushes readings and lines to open pages. ``otlp`` sends metrics and
traces. Nothing changes a run, and all data come from the readers of the commands and of
``elaunch.monitor.screen``.
"""

__all__ = ["otlp", "serving"]
