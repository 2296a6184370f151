"""What is behind an error of torch: the OSError of a disk that was full, of a file that was closed.

``torch.save`` to an open file raises a RuntimeError about its archive ("unexpected pos 704 vs 598")
while it handles what the file itself raised.
"""

from __future__ import annotations

from pathlib import Path


def os_error_behind(error: BaseException, path: Path) -> OSError | None:
    """Return an OSError of ``path`` if one is behind ``error``, or is it; else None."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    if behind is None or behind.errno is None:
        return None
    return OSError(behind.errno, behind.strerror, str(path))
