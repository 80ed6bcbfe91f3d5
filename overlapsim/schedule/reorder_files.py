"""Side files of plans: integer arrays in an ``.npz`` named by its content, too long to stand in the plan itself."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import threading
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from overlapsim.errors import PlanError
from overlapsim.schedule.reorder_layout import Int32Array


@dataclass(frozen=True)
class SideFile:
    """A file to stand beside a plan.

    Attributes
    ----------
    name : ``reorder-<start of the digest>.npz``: equal maps share a file, different ones never do
    sha256 : of the whole file
    data : the whole file
    """

    name: str
    sha256: str
    data: bytes


def encode(arrays: Mapping[str, Int32Array]) -> SideFile:
    """Pack arrays; equal arrays give equal bytes on every machine.

    Examples
    --------
    >>> side = encode({"tile_slot": np.array([1, 0], np.int32)})
    >>> side.name == f"reorder-{side.sha256[:16]}.npz"
    True
    """
    packed = io.BytesIO()
    # Stored, not deflated: compressed bytes differ between versions of the compressor, and with them the digest.
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(name + ".npy", (1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array.astype("<i4"), version=(1, 0), allow_pickle=False)
            archive.writestr(entry, buffer.getvalue())
    data = packed.getvalue()
    sha256 = hashlib.sha256(data).hexdigest()
    return SideFile(f"reorder-{sha256[:16]}.npz", sha256, data)


def write(side: SideFile, folder: str | Path) -> Path:
    """Put a side file into `folder` in one step; a reader never sees a part.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    PlanError
        If the folder cannot be written; nothing is left behind.
    """
    target = Path(folder) / side.name
    # Two writers must not share the temporary file; what they rename has the same content.
    temporary = target.with_name(f".{side.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        temporary.write_bytes(side.data)
        temporary.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise PlanError(
            f"cannot write reorder map {target}: {error.strerror or error}; choose another folder for the plan"
        ) from None
    return target


def read(folder: str | Path, name: str, sha256: str) -> dict[str, Int32Array]:
    """Arrays of the side file `name` in `folder`.

    Raises
    ------
    PlanError
        If `name` is not a plain file name, or the file is missing, is not the
        one the plan was written with, or holds anything but lists of integers.
    """
    if not name or Path(name).name != name:
        raise PlanError(f"the plan names reorder map {name!r}; expected the name of a file beside the plan")
    path = Path(folder) / name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PlanError(
            f"cannot read reorder map {path}: {error.strerror or error}; keep it beside its plan or plan again"
        ) from None
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise PlanError(
            f"{path} has SHA-256 {found}; the plan expects {sha256}: it belongs to another plan, plan again"
        )
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            arrays = {
                entry.removesuffix(".npy"): np.lib.format.read_array(
                    io.BytesIO(archive.read(entry)), allow_pickle=False
                )
                for entry in archive.namelist()
            }
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise PlanError(f"{path} is not a reorder map ({error}); plan again") from None
    for what, array in arrays.items():
        if array.ndim != 1 or array.dtype != np.int32:
            raise PlanError(
                f"{what} in {path} has shape {array.shape} and type {array.dtype}; expected a list of int32"
            )
    return arrays
