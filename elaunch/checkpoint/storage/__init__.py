"""Where a run puts its checkpoints: a directory, or objects behind a URL.

``storage`` is what both can do; ``posix`` does it with renames and fsync, in the order that
``commit`` explains step by step, ``url`` with whole objects. ``durable`` puts files on the disk so
that they are never torn, ``checksums`` finds what has changed there.
"""

__all__ = ["checksums", "commit", "durable", "files", "objects", "storage"]
