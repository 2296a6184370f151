"""Runs and jobs for people and programs: they are read, then made a page, or JSON.

``read`` makes the one document of a job (elaunch.runs.job); ``page`` makes text of it, which
``layout`` prints; ``json`` the documents of docs/status.md; ``attention`` names what a person
should look at; ``failures`` shows the reports of failed rounds; ``store`` reads a whole job where
its agents meet.
"""

__all__ = ["attention", "failures", "json", "layout", "page", "read", "store"]
