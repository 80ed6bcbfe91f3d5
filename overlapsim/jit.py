"""The only importer of numba: compiled functions share one cached, bit-exact configuration."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile `function` to machine code on first call and cache it on disk.

    Fast-math stays off, so nothing is reassociated and no product is fused
    into a sum: the engines promise the same float64 bits as plain Python
    (docs/program.md section 3.6).  The lock of the interpreter is released
    while the code runs.  Where no cache folder can be written, the function
    is compiled anew in every process.

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
        dispatcher = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # "no locator available": neither the package nor a user folder is writable
        return numba.njit(**options)(function)  # type: ignore[no-any-return]
    # numba refreshes its cache when the caller's file changes; a callee in another file counts as well.
    cache_file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = _source_stamp(Path(inspect.getfile(function)))
    return dispatcher  # type: ignore[no-any-return]


@lru_cache
def _source_stamp(file: Path) -> bytes:
    """Digest of `file`, of the ``kernel_*.py`` beside it, and of the options in this file."""
    digest = hashlib.sha256()
    for path in sorted({file, Path(__file__), *file.parent.glob("kernel_*.py")}):
        if path.exists():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()
