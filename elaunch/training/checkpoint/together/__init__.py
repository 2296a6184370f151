"""What all ranks do together: an error of one is an error of all.

Every step of a save or a load ends with one allgather (``agree``); ``guard`` turns whatever torch
or a user's object raises into such an error, ``compare`` checks what has to be equal on all ranks.
"""

__all__ = ["agree", "compare", "guard"]
