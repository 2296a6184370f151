"""A run on disk: its directory, its record, and where both are.

``directory`` finds, makes and prunes run directories; ``record`` is the record that
``elaunch status`` shows (``first`` and ``saves`` are parts of it); ``statedir`` writes files so
that readers never see half of one.
"""

__all__ = ["directory", "first", "record", "saves", "statedir"]
