"""Element-wise consumers that undo the order of a packed buffer while they read it."""

from __future__ import annotations

from overlapsim.validate.kernels.orders import RestoreOrder
from torch import Tensor


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

    Sums are in fp32.

    Parameters
    ----------
    packed : contiguous, at least ``restore.packed_elements``
    restore : of this rank
    weight : shape (n,)
    out : shape (rows, n), contiguous
    eps : added to the mean square
    residual, residual_out : shape (rows, n): added before the norm, and where the sum is stored; both or neither

    Raises
    ------
    StrategyError
        If sizes, types or devices do not fit.
    """
    raise NotImplementedError


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
    raise NotImplementedError
