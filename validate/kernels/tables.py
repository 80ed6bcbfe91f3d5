"""What the tables of kernels share: from arrays to tensors, alignment, and checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from overlapsim.validate.kernels.config import GemmConfig

from overlapsim.errors import StrategyError

if TYPE_CHECKING:
    from torch import Tensor

    Device = str | Any


def is_aligned(slab: NDArray[Any], n: int) -> bool:
    """Whether every row of every tile starts at a multiple of 16 elements: widths are then multiples of 16 too."""
    return n % 16 == 0 and bool((slab % 16 == 0).all())


def check_tile(config: GemmConfig, bm: int, bn: int) -> None:
    """Refuse a kernel of another tile than the map's.

    Raises
    ------
    StrategyError
        If tiles differ.
    """
    if (config.bm, config.bn) != (bm, bn):
        raise StrategyError(
            f"a kernel of {config.bm}x{config.bn} tiles for a map of {bm}x{bn} tiles; expected the same tile"
        )


def check_rank(rank: int, ranks: int) -> None:
    """Refuse a rank that the map does not have.

    Raises
    ------
    StrategyError
        If there is no such rank.
    """
    if not 0 <= rank < ranks:
        raise StrategyError(f"rank {rank} of a map for {ranks} ranks; expected 0 .. {ranks - 1}")


def tensor_of(values: NDArray[Any], dtype: Any, device: Device) -> Tensor:
    """Copy an array to a device: maps are read-only, and torch would write through."""
    import torch

    return torch.from_numpy(np.array(values, dtype=dtype, order="C")).to(device)
