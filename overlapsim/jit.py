"""The only importer of numba: compiled functions share one cached, bit-exact configuration."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

import numba
from numba.core import event

F = TypeVar("F", bound=Callable[..., Any])
PACKAGE: Final = Path(__file__).resolve().parent


def compiled(function: F) -> F:
    """Compile `function` to machine code on first call and cache it on disk.

    Fast-math stays off, so nothing is reassociated and no product is fused
    into a sum: the engines promise the same float64 bits as plain Python
    (docs/program.md section 3.6).  The lock of the interpreter is released
    while the code runs.  The cache of this package lies outside it, see
    :func:`cache_folder`; where no folder can be written, the function is
    compiled anew in every process.

    A compiled function may call compiled functions of its own file and of
    files named ``kernel_*.py`` beside it: the cache is refreshed when any of
    these changes.

    Parameters
    ----------
    function : callable
        A module-level function inside the part of Python that numba compiles.
    """
    return _compile(function, {})


def borrowing(function: F) -> F:
    """Like :func:`compiled`, for parts of a kernel that neither create nor return arrays.

    They borrow their caller's arrays, so no references are counted: with a
    dozen arrays that costs more than a short function itself.  Called only
    from compiled functions.
    """
    return _compile(function, {"_nrt": False, "no_cpython_wrapper": True})


def inlined(function: F) -> F:
    """Like :func:`borrowing`, and always made part of its caller, which saves handing over the arrays."""
    return _compile(function, {"_nrt": False, "no_cpython_wrapper": True, "forceinline": True})


def _compile(function: F, special: dict[str, Any]) -> F:
    options: dict[str, Any] = {"fastmath": False, "error_model": "numpy", "nogil": True, **special}
    try:
        with _cache_placed(Path(inspect.getfile(function))):
            dispatcher = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # "no locator available": neither the package nor a user folder is writable
        return numba.njit(**options)(function)  # type: ignore[no-any-return]
    # numba refreshes its cache when the caller's file changes; a callee in another file counts as well.
    cache_file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = _source_stamp(Path(inspect.getfile(function)))
    return dispatcher  # type: ignore[no-any-return]


def cache_folder() -> Path | None:
    """Where machine code of this package is kept: ``overlapsim/numba`` in the user's cache folder.

    That is ``XDG_CACHE_HOME`` where it is an absolute path, else ``~/.cache``;
    None for a user without a home.  Not in the package: files there outlive
    an uninstallation, and the folder they keep alive hides the next one.
    numba adds a folder for each place of installation, so that two do not meet.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return cache / "overlapsim" / "numba"


@contextmanager
def _cache_placed(file: Path) -> Iterator[None]:
    """While a function of this package is decorated, numba caches in our folder; elsewhere as the user set it.

    A folder set by the user (``NUMBA_CACHE_DIR``) stands, other packages' functions stay where numba puts them, and
    where ours cannot be written numba tries its own places.
    """
    folder = cache_folder()
    if numba.config.CACHE_DIR or folder is None or PACKAGE not in file.resolve().parents:
        yield
        return
    numba.config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = ""


class _Compilation(event.Listener):  # type: ignore[misc]
    def __init__(self, begins: Callable[[], None], ends: Callable[[], None]) -> None:
        self._begins, self._ends = begins, ends
        self._depth = 0

    def on_start(self, event: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._begins()

    def on_end(self, event: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._ends()


def on_compilation(begins: Callable[[], None], ends: Callable[[], None]) -> AbstractContextManager[None]:
    """Within this context both are called around each compilation of a function that the cache does not hold.

    Parameters
    ----------
    begins, ends : callable
        Called before and after, in the thread that compiles; to be quick. A function that is compiled for another is
        part of its compilation.
    """
    return event.install_listener("numba:compile", _Compilation(begins, ends))  # type: ignore[no-any-return]


@lru_cache
def _source_stamp(file: Path) -> bytes:
    """Digest of `file`, of the ``kernel_*.py`` beside it, and of the options in this file."""
    digest = hashlib.sha256()
    for path in sorted({file, Path(__file__), *file.parent.glob("kernel_*.py")}):
        if path.exists():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()
