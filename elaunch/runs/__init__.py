"""A run on disk: its directory, its record, and where both are.

``directory`` finds, makes and prunes run directories; ``record`` is the record that
``elaunch status`` shows; ``statedir`` writes files so that readers never see half of one.
"""

__all__ = ["directory", "record", "statedir"]
