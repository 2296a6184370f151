"""Which checkpoints stay, and how the others go.

``rule`` is the rule as the user gave it, ``delete`` applies it; pinned checkpoints stay, and one
that is being read goes later. A directory leaves the readers' sight in one rename
before it is deleted, and one that failed verification is kept with its reason (``shelves``).
"""

__all__ = ["delete", "rule", "shelves"]
