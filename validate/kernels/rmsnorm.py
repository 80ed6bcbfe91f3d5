"""RMSNorm of rows that still stand in the order of tiles, optionally behind a residual add."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from overlapsim.validate.kernels.restore import load_restored


@triton.jit
def rmsnorm_kernel(
    packed_ptr,
    slab_ptr,
    row_slab_ptr,
    row_place_ptr,
    weight_ptr,
    residual_ptr,
    sum_ptr,
    out_ptr,
    grid_n,
    n,
    eps,
    TILES: tl.constexpr,
    BN: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADDED: tl.constexpr,
    ONE_PART: tl.constexpr,
):
    """One row a program, TILES tile columns at a time; rows that fit at once are read once."""
    row = tl.program_id(0)
    slab = tl.load(row_slab_ptr + row)
    place = tl.load(row_place_ptr + row)
    base = row.to(tl.int64) * n
    at = (tl.arange(0, TILES) * BN)[:, None] + tl.arange(0, BN)[None, :]
    if ONE_PART:
        inside = at < n
        x = load_restored(packed_ptr, slab_ptr, slab, place, 0, grid_n, n, TILES, BN, ALIGNED)
        if ADDED:
            x += tl.load(residual_ptr + base + at, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) / n + eps)
        if ADDED:
            tl.store(sum_ptr + base + at, x.to(sum_ptr.dtype.element_ty), mask=inside)
        y = x * scale * tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + base + at, y.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        square = tl.zeros((TILES, BN), dtype=tl.float32)
        for first in range(0, grid_n, TILES):
            here = at + first * BN
            x = load_restored(packed_ptr, slab_ptr, slab, place, first, grid_n, n, TILES, BN, ALIGNED)
            if ADDED:
                x += tl.load(residual_ptr + base + here, mask=here < n, other=0.0).to(tl.float32)
            square += x * x
        scale = 1.0 / tl.sqrt(tl.sum(tl.sum(square, axis=1), axis=0) / n + eps)
        for first in range(0, grid_n, TILES):
            here = at + first * BN
            x = load_restored(packed_ptr, slab_ptr, slab, place, first, grid_n, n, TILES, BN, ALIGNED)
            if ADDED:
                x += tl.load(residual_ptr + base + here, mask=here < n, other=0.0).to(tl.float32)
            if ADDED:
                tl.store(sum_ptr + base + here, x.to(sum_ptr.dtype.element_ty), mask=here < n)
            y = x * scale * tl.load(weight_ptr + here, mask=here < n, other=0.0).to(tl.float32)
            tl.store(out_ptr + base + here, y.to(out_ptr.dtype.element_ty), mask=here < n)
