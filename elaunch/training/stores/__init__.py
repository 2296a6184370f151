"""The round's TCPStore, as the ranks use it.

``roundstore`` is how they meet and agree, ``keystore`` the small store that scripts get as
``ctx.distributed.store``, ``connection`` a connection for a thread that lives as long as the
context.
"""

__all__ = ["connection", "keystore", "roundstore"]
