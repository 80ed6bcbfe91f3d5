"""Which GEMM rows a fit may see: hashed halves, blocks of unseen n and k, and small m only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from overlapsim.cost.gemm_fitted import GemmRows

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

BLOCKS: Final = 3
LARGEST_FITTED_M: Final = 2048


def hash_share(rows: GemmRows, salt: str = "") -> FloatArray:
    """A number in [0, 1) per shape, from SHA-256 of ``{salt}{m}x{n}x{k}``: the same on every machine."""
    texts = (f"{salt}{m:.0f}x{n:.0f}x{k:.0f}" for m, n, k in zip(rows.m, rows.n, rows.k, strict=True))
    return np.array([int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32 for text in texts])


def hashed(rows: GemmRows) -> tuple[BoolArray, BoolArray]:
    """Masks (fitted, unfitted) of the hashed halves: the fitted one has a hash share below 0.5."""
    below = hash_share(rows) < 0.5
    return below, ~below


def blocked(rows: GemmRows) -> Iterator[tuple[BoolArray, BoolArray]]:
    """Masks (fitted, unfitted) of three blocks: every third n and every third k of the table, whole, is unseen.

    Rows with an unseen n and a seen k, or the other way round, belong to neither.
    """
    n_block, k_block = _block(rows.n), _block(rows.k)
    for block in range(BLOCKS):
        yield (n_block != block) & (k_block != block), (n_block == block) & (k_block == block)


def large_m(rows: GemmRows) -> tuple[BoolArray, BoolArray]:
    """Masks (fitted, unfitted) of an extrapolation: m up to 2048 is fitted."""
    small = rows.m <= LARGEST_FITTED_M
    return small, ~small


def splits(rows: GemmRows) -> dict[str, tuple[BoolArray, BoolArray]]:
    """All of them by name."""
    found = {"hashed": hashed(rows), "large_m": large_m(rows)}
    return found | {f"blocked_{block}": masks for block, masks in enumerate(blocked(rows))}


def _block(values: FloatArray) -> NDArray[np.intp]:
    return np.unique(values, return_inverse=True)[1] % BLOCKS
