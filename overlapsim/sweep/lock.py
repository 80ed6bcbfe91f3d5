"""One writer at a time: a lock that ends with its process, however that ends."""

from __future__ import annotations

import os
from pathlib import Path

from overlapsim.errors import UsageError


def lock(descriptor: int, path: Path) -> None:
    """Lock an open file or folder until it is closed, where the system has such locks.

    Raises
    ------
    UsageError
        If another process holds it, or has put another file in its place.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    busy = UsageError(f"another sweep writes to {path}; wait for it, or give another name")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise busy from None
    # A sweep that ends replaces its file: a lock on the old one would guard nothing.
    if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):
        raise busy
