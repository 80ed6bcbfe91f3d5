"""Element-wise consumers that undo the order of a packed buffer while they read it."""

from __future__ import annotations

from typing import Any, Final

from overlapsim.validate.kernels.add import add_kernel
from overlapsim.validate.kernels.checks import check_floats, check_packed, check_place, check_shape, launch
from overlapsim.validate.kernels.restore_order import RestoreOrder
from overlapsim.validate.kernels.rmsnorm import rmsnorm_kernel
from torch import Tensor

from overlapsim.errors import StrategyError

WHOLE_ROW: Final = 16384
"""Longest row, padded to a power of two of tile columns, that one program keeps in registers."""
PART_OF_ROW: Final = 4096
"""Elements of a longer row, or of a row to be added to, that a program takes at a time."""


def restored_rmsnorm(
    packed: Tensor,
    restore: RestoreOrder,
    weight: Tensor,
    out: Tensor,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> None:
    """Normalise rows read through the map: ``out = x / rms(x) * weight`` with ``x = restored(packed) + residual``.

    Sums are in fp32, and so is x: what `residual_out` holds is rounded, what is normalised is not.

    Parameters
    ----------
    packed : contiguous, at least ``restore.packed_elements``
    restore : of this rank
    weight : shape (n,), contiguous
    out : shape (rows, n), contiguous
    eps : added to the mean square
    residual, residual_out : shape (rows, n), contiguous: added before the norm, and where the sum is stored (may be
        `residual` itself); both or neither

    Raises
    ------
    StrategyError
        If sizes, types or devices do not fit.
    """
    if (residual is None) != (residual_out is None):
        raise StrategyError("one of residual and residual_out is missing; expected both or neither")
    shape = (restore.rows, restore.n)
    others = {"out": out, "residual": residual, "residual_out": residual_out}
    _check(packed, restore, {name: tensor for name, tensor in others.items() if tensor is not None}, shape)
    _check(packed, restore, {"weight": weight}, (restore.n,))
    if not restore.rows:
        return
    tiles, whole = _tile_columns(restore, WHOLE_ROW)
    added = residual is not None
    launch(
        rmsnorm_kernel,
        (restore.rows,),
        (
            *(packed, restore.slab_start, restore.row_slab, restore.row_place, weight),
            *(residual if residual is not None else out, residual_out if residual_out is not None else out, out),
            *(restore.slab_start.shape[1], restore.n, eps),
        ),
        {**_shape(restore, tiles), "ADDED": added, "ONE_PART": whole},
        packed.device,
    )


def restored_add(packed: Tensor, restore: RestoreOrder, residual: Tensor | None, out: Tensor) -> None:
    """Add a residual to rows read through the map: ``out = restored(packed) + residual``; None only restores.

    Parameters
    ----------
    packed, restore : as in `restored_rmsnorm`
    residual, out : shape (rows, n), contiguous

    Raises
    ------
    StrategyError
        If sizes, types or devices do not fit.
    """
    tensors = {"out": out} if residual is None else {"out": out, "residual": residual}
    _check(packed, restore, tensors, (restore.rows, restore.n))
    if not restore.rows:
        return
    tiles, _ = _tile_columns(restore, PART_OF_ROW)
    columns = restore.slab_start.shape[1]
    launch(
        add_kernel,
        (restore.rows, -(-columns // tiles)),
        (
            *(packed, restore.slab_start, restore.row_slab, restore.row_place),
            *(out if residual is None else residual, out, columns, restore.n),
        ),
        {**_shape(restore, tiles), "ADDED": residual is not None},
        packed.device,
    )


def _check(packed: Tensor, restore: RestoreOrder, others: dict[str, Tensor], shape: tuple[int, ...]) -> None:
    check_place(packed, restore.slab_start, *others.values())
    check_floats("packed, residual, weight and out", packed, *others.values())
    check_packed(packed, restore.packed_elements)
    for name, tensor in others.items():
        check_shape(name, tensor, shape)
        if not tensor.is_contiguous():
            raise StrategyError(f"{name} is not contiguous; expected rows one behind the other")


def _tile_columns(restore: RestoreOrder, most: int) -> tuple[int, bool]:
    """Tile columns that a program takes at a time, a power of two, and whether that is the whole row."""
    columns = int(restore.slab_start.shape[1])
    whole = 1 << (columns - 1).bit_length()
    if whole * restore.bn <= most:
        return whole, True
    part = max(1, PART_OF_ROW // restore.bn)
    return 1 << (part.bit_length() - 1), False


def _shape(restore: RestoreOrder, tiles: int) -> dict[str, Any]:
    # 16 to 32 elements a thread keep loads wide and registers few.
    warps = max(1, min(16, tiles * restore.bn // 1024))
    return {
        "TILES": tiles,
        "BN": restore.bn,
        "ALIGNED": restore.aligned,
        "num_warps": 1 << (warps.bit_length() - 1),
        "num_stages": 1,
    }
