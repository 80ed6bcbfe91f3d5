"""Pieces that GEMM kernels share: the main loop of one tile, and the store of one tile in any order."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply_tile(
    a_ptr,
    b_ptr,
    tile,
    grid_n,
    m,
    n,
    k,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    HALF_SUM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply what one tile of C needs; rows, columns and steps outside the operands count as zero.

    The tile's own address is 64 bits wide, since operands may have more than 2^31 elements; inside a tile and a step
    offsets are 32 bits, which halves their registers (the launch refuses strides for which they would wrap).
    """
    top = tile // grid_n * BM
    left = tile % grid_n * BN
    row = tl.arange(0, BM)
    column = tl.arange(0, BN)
    step = tl.arange(0, BK)
    row_inside = (row < m - top)[:, None]
    column_inside = (column < n - left)[None, :]
    a_at = a_ptr + tl.cast(top, tl.int64) * stride_am
    b_at = b_ptr + tl.cast(left, tl.int64) * stride_bn
    a_offset = row[:, None] * stride_am + step[None, :] * stride_ak
    b_offset = step[:, None] * stride_bk + column[None, :] * stride_bn
    total = tl.zeros((BM, BN), dtype=tl.float16) if HALF_SUM else tl.zeros((BM, BN), dtype=tl.float32)
    for done in range(0, k, BK):
        if EVEN_K:
            a = tl.load(a_at + a_offset, mask=row_inside, other=0.0)
            b = tl.load(b_at + b_offset, mask=column_inside, other=0.0)
        else:
            a = tl.load(a_at + a_offset, mask=row_inside & (step[None, :] < k - done), other=0.0)
            b = tl.load(b_at + b_offset, mask=column_inside & (step[:, None] < k - done), other=0.0)
        if HALF_SUM:
            total = tl.dot(a, b, total, out_dtype=tl.float16)
        else:
            total = tl.dot(a, b, total, input_precision=PRECISION)
        a_at += BK * tl.cast(stride_ak, tl.int64)
        b_at += BK * tl.cast(stride_bk, tl.int64)
    return total


@triton.jit
def store_rows(out_ptr, total, tile, grid_n, m, n, stride_om, stride_on, BM: tl.constexpr, BN: tl.constexpr):
    """Store a tile where it belongs in C."""
    row = tile // grid_n * BM + tl.arange(0, BM)
    column = tile % grid_n * BN + tl.arange(0, BN)
    at = out_ptr + row.to(tl.int64)[:, None] * stride_om + column.to(tl.int64)[None, :] * stride_on
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


@triton.jit
def store_packed(
    out_ptr,
    total,
    tile,
    slot,
    grid_n,
    num_tiles,
    m,
    n,
    slab_ptr,
    part_ptr,
    index_ptr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BY_ROW: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Store a tile at its slot of the packed buffer, whole or row by row to the parts of several ranks.

    Rows are as wide as the tile, so that the buffer has no holes. ALIGNED: all row starts are multiples of 16
    elements, which lets a thread store 16 bytes at once.
    """
    local = tl.arange(0, BM)
    row = tile // grid_n * BM + local
    column = tl.arange(0, BN)
    width = tl.minimum(n - tile % grid_n * BN, BN)
    if BY_ROW:
        part = tl.load(part_ptr + row, mask=row < m, other=0).to(tl.int64)
        place = tl.load(index_ptr + row, mask=row < m, other=0)
        start = tl.load(slab_ptr + part * num_tiles + slot)
        at = start + place * width
    else:
        at = tl.load(slab_ptr + slot) + local * width
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    inside = (row < m)[:, None] & (column < width)[None, :]
    tl.store(out_ptr + at[:, None] + column[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def count_tile(counter_ptr, group_ptr, slot):
    """Count a stored tile for its group: every thread's stores first, then one add that releases them.

    The barrier orders the block's stores before the add of one thread; a release at device scope is cumulative, so
    whoever reads the count with acquire sees them. Without the barrier other warps' stores may still be on their way.
    """
    group = tl.load(group_ptr + slot)
    tl.debug_barrier()
    tl.atomic_add(counter_ptr + group, 1, sem="release", scope="gpu")
