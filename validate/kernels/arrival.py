"""GEMM whose tiles start as soon as the shards of A that they need have arrived."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from overlapsim.validate.kernels.clock import DONE, TIMED_OUT, in_time, now_ns, pause
from overlapsim.validate.kernels.tile import multiply_tile, store_rows


@triton.jit
def await_shard(flag_ptr, status_ptr, shard, expected, timeout_us, max_polls, CLOCK: tl.constexpr):
    """Poll a shard's flag with acquire; once one program has given up on a shard, no other waits for it."""
    start = now_ns(CLOCK)
    polls = 0
    seen = tl.atomic_add(flag_ptr + shard, 0, sem="acquire", scope="gpu")
    given_up = tl.atomic_add(status_ptr + 2 * shard, 0, sem="relaxed", scope="gpu") == TIMED_OUT
    while (seen < expected) & (given_up == 0) & in_time(start, timeout_us, polls, max_polls, CLOCK):
        pause(CLOCK)
        seen = tl.atomic_add(flag_ptr + shard, 0, sem="acquire", scope="gpu")
        given_up = tl.atomic_add(status_ptr + 2 * shard, 0, sem="relaxed", scope="gpu") == TIMED_OUT
        polls += 1
    outcome = tl.where(seen >= expected, DONE, TIMED_OUT)
    tl.atomic_max(status_ptr + 2 * shard, outcome, sem="relaxed", scope="gpu")
    tl.atomic_max(status_ptr + 2 * shard + 1, seen, sem="relaxed", scope="gpu")


@triton.jit(do_not_specialize=["expected", "timeout_us", "max_polls", "shard_rows"])
def arrival_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    tile_ptr,
    flag_ptr,
    status_ptr,
    num_tiles,
    grid_n,
    m,
    n,
    k,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_om,
    stride_on,
    shard_rows,
    expected,
    timeout_us,
    max_polls,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    HALF_SUM: tl.constexpr,
    PRECISION: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """Take tiles in the order in which their rows arrive; wait for every shard that a tile touches."""
    for slot in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile = tl.load(tile_ptr + slot)
        top = tile // grid_n * BM
        for shard in range(top // shard_rows, (tl.minimum(top + BM, m) - 1) // shard_rows + 1):
            await_shard(flag_ptr, status_ptr, shard, expected, timeout_us, max_polls, CLOCK)
        # One thread has read the flag; the block's loads of A must come after it.
        tl.debug_barrier()
        total = multiply_tile(
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
            BM=BM,
            BN=BN,
            BK=BK,
            EVEN_K=EVEN_K,
            HALF_SUM=HALF_SUM,
            PRECISION=PRECISION,
        )
        store_rows(out_ptr, total, tile, grid_n, m, n, stride_om, stride_on, BM=BM, BN=BN)
