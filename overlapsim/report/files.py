"""Writes whole files or none: a temporary neighbour first, then a rename."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from pathlib import Path

from overlapsim.errors import UsageError


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replace `path` by `data` in one step; a reader sees the old file or the new one, never a part.

    A symbolic link is followed and stays a link; an existing file keeps its
    permissions.  A target that cannot be replaced, such as ``/dev/null`` or
    a named pipe, is written directly.

    Parameters
    ----------
    path : str or Path
        Target file; its folder must exist.
    data : bytes
        The whole content.

    Raises
    ------
    UsageError
        If the folder does not exist or is not writable, `path` is a folder,
        or the data does not fit; nothing is left behind and an existing
        file is untouched.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> target = pathlib.Path(tempfile.mkdtemp()) / "report.txt"
    >>> write_bytes(target, b"done")
    >>> target.read_bytes()
    b'done'
    """
    target = check_writable(path)
    try:
        mode = target.stat().st_mode
    except OSError:
        mode = None
    try:
        if mode is not None and not stat.S_ISREG(mode):
            target.write_bytes(data)
            return
        _replace(target, data, mode)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another file or folder") from error


def write_text(path: str | Path, text: str) -> None:
    r"""Replace `path` by `text` in UTF-8 with ``\n`` line ends, in one step; see :func:`write_bytes`.

    Raises
    ------
    UsageError
        As :func:`write_bytes`.
    """
    write_bytes(path, text.encode("utf-8"))


def check_writable(path: str | Path) -> Path:
    """Resolve `path` as a place where a file can be put: ask before long work, not after it.

    Returns
    -------
    Path
        The file to replace, links resolved.

    Raises
    ------
    UsageError
        If `path` is a folder, or its folder does not exist, is not a folder
        or is not writable.
    """
    target = Path(os.path.realpath(path))
    folder = target.parent
    if not Path(path).name or target.is_dir():
        raise UsageError(f"{path} is a folder; expected the name of a file to write")
    if not folder.exists():
        raise UsageError(f"cannot write {path}: the folder {folder} does not exist; create it first")
    if not folder.is_dir():
        raise UsageError(f"cannot write {path}: {folder} is not a folder")
    writable_in_place = target.exists() and not target.is_file() and os.access(target, os.W_OK)
    if not writable_in_place and not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write {path}: the folder {folder} is not writable; choose another folder")
    return target


def _replace(target: Path, data: bytes, mode: int | None) -> None:
    # Two writers of one file must not share the temporary; the last rename wins, and both files are whole.
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        temporary.write_bytes(data)
        if mode is not None:
            temporary.chmod(stat.S_IMODE(mode))
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
