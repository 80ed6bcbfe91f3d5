"""Residual add to rows that still stand in the order of tiles."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from overlapsim.validate.kernels.restore import load_restored


@triton.jit
def add_kernel(
    packed_ptr,
    slab_ptr,
    row_slab_ptr,
    row_place_ptr,
    residual_ptr,
    out_ptr,
    grid_n,
    n,
    TILES: tl.constexpr,
    BN: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADDED: tl.constexpr,
):
    """One row and TILES tile columns a program; without ADDED it only restores the order."""
    row = tl.program_id(0)
    first = tl.program_id(1) * TILES
    slab = tl.load(row_slab_ptr + row)
    place = tl.load(row_place_ptr + row)
    x = load_restored(packed_ptr, slab_ptr, slab, place, first, grid_n, n, TILES, BN, ALIGNED)
    column = ((first + tl.arange(0, TILES)) * BN)[:, None] + tl.arange(0, BN)[None, :]
    at = row.to(tl.int64) * n + column
    if ADDED:
        x += tl.load(residual_ptr + at, mask=column < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=column < n)
