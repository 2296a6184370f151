"""The round's TCPStore, as the ranks use it.

``roundstore`` is how they meet and agree, ``keystore`` the small store that scripts get as
``ctx.distributed.store``.
"""

__all__ = ["keystore", "roundstore"]
