"""Whether a directory is on a file system whose clients cache and see others' writes late."""

from __future__ import annotations

import os
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_REMOTE = frozenset(
    "9p afs beegfs ceph cifs gfs2 glusterfs gpfs lustre nfs nfs4 ocfs2 orangefs panfs smb3"
    " virtiofs wekafs".split()
)


def is_remote(path: Path, mounts: Path = _MOUNTS) -> bool:
    """Tell whether ``path`` is on a network file system, or on FUSE, which may be one."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return False
    # "36 35 98:0 / /mnt rw - ext3 /dev/root rw": the type is behind the separator " - ".
    kinds = [line.partition(" - ")[2].split()[:1] for line in lines if line.split()[2] == wanted]
    return any(kind in _REMOTE or kind.startswith("fuse") for [kind] in filter(None, kinds))
