"""Views of a run: they read its record, its agent's socket and /proc, and change nothing."""
