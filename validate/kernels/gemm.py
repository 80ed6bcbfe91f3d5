"""Signalled GEMM: tiles in a given order, stored packed or in place, each counted for its group; experts optional."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from overlapsim.validate.kernels.tile import count_tile, multiply_tile, store_packed, store_rows


@triton.jit
def gemm_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    tile_ptr,
    group_ptr,
    counter_ptr,
    slab_ptr,
    part_ptr,
    index_ptr,
    expert_ptr,
    num_tiles,
    grid_n,
    m,
    n,
    k,
    stride_am,
    stride_ak,
    stride_be,
    stride_bk,
    stride_bn,
    stride_om,
    stride_on,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    HALF_SUM: tl.constexpr,
    PRECISION: tl.constexpr,
    EXPERTS: tl.constexpr,
    PACKED: tl.constexpr,
    BY_ROW: tl.constexpr,
    ALIGNED: tl.constexpr,
    COUNTED: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    """Slots from the first to the last: one a program, or PERSISTENT programs that take every num_programs-th.

    Pointers that a variant does not read may be any pointer of their type.
    """
    first = tl.program_id(0)
    end = num_tiles if PERSISTENT else first + 1
    for slot in range(first, end, tl.num_programs(0)):
        tile = tl.load(tile_ptr + slot)
        steps = k
        b_at = b_ptr
        if EXPERTS:
            expert = tl.load(expert_ptr + tile // grid_n)
            # Rows without an expert take no step along K and store zeros.
            steps = tl.where(expert < 0, 0, k)
            b_at = b_ptr + tl.maximum(expert, 0).to(tl.int64) * stride_be
        total = multiply_tile(
            a_ptr,
            b_at,
            tile,
            grid_n,
            m,
            n,
            steps,
            stride_am,
            stride_ak,
            stride_bk,
            stride_bn,
            BM=BM,
            BN=BN,
            BK=BK,
            EVEN_K=EVEN_K,
            HALF_SUM=HALF_SUM,
            PRECISION=PRECISION,
        )
        if PACKED:
            store_packed(
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
                BM=BM,
                BN=BN,
                BY_ROW=BY_ROW,
                ALIGNED=ALIGNED,
            )
        else:
            store_rows(out_ptr, total, tile, grid_n, m, n, stride_om, stride_on, BM=BM, BN=BN)
        if COUNTED:
            count_tile(counter_ptr, group_ptr, slot)
