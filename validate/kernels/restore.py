"""Reading rows of a packed buffer through the map, for element-wise kernels."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_restored(
    packed_ptr, slab_ptr, slab, place, first, grid_n, n, TILES: tl.constexpr, BN: tl.constexpr, ALIGNED: tl.constexpr
):
    """Load TILES tile columns of one row as fp32, shape (TILES, BN), from tile column `first` on; 0 outside C.

    One address is read a tile column, not one an element.
    """
    tile = first + tl.arange(0, TILES)
    width = tl.minimum(n - tile * BN, BN)
    start = tl.load(slab_ptr + slab.to(tl.int64) * grid_n + tile, mask=tile < grid_n, other=0) + place * width
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    column = tl.arange(0, BN)
    inside = (tile < grid_n)[:, None] & (column[None, :] < width[:, None])
    return tl.load(packed_ptr + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
