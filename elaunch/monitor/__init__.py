"""Views of a run: they read its record, its agent's socket and /proc.

What is to change is asked of its agent (``nodeviews``).
"""
