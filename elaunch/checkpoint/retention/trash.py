"""Taking directories away from readers at once, and deleting them after.

====================  =============================================================================
function              does
====================  =============================================================================
``throw_away``        renames into ``.trash/``, then deletes: no reader sees half a checkpoint
``empty``             deletes what an earlier process had renamed and not deleted
====================  =============================================================================

On a disk so full that not even a rename succeeds, COMMIT is removed first: what has none does not
exist for readers.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
from pathlib import Path

from elaunch.checkpoint import layout

log = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)


def throw_away(root: Path, path: Path) -> None:
    """Remove a directory below ``root``; nothing if it is gone already. OSError if it stays."""
    trash = root / layout.TRASH
    target = trash / f"{path.name}.{secrets.token_hex(4)}"
    try:
        trash.mkdir(exist_ok=True)
        os.rename(path, target)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in _FULL:
            raise
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path / layout.COMMIT)
        target = path
    _delete(target)


def empty(root: Path) -> None:
    """Delete all that is in the trash."""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(root / layout.TRASH):
            _delete(Path(entry.path))


def _delete(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        # Such as a file that a reader on NFS still has open: the next one to empty it succeeds.
        log.warning("%s cannot be deleted now; it is no checkpoint any more", path)
