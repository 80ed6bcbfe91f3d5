"""GEMM kernels as functions: signalled and reordered, by experts, and behind the arrival of its input."""

from __future__ import annotations

from typing import Literal

from overlapsim.validate.kernels.orders import ArrivalOrder, TileOrder
from torch import Tensor

Store = Literal["reordered", "row_major"]


def signalled_gemm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    order: TileOrder,
    counters: Tensor | None,
    *,
    persistent: bool = False,
    num_sms: int | None = None,
    store: Store = "reordered",
    tf32: bool = False,
) -> None:
    """Compute ``C[m, n] = A[m, k] B[k, n]``, store its tiles in order of execution and count each for its group.

    All stores of a tile are done, on the device, before its count is seen: block barrier, then an atomic add with
    release at device scope.

    Parameters
    ----------
    a, b : shapes (m, k) and (k, n), any strides, fp16, bf16 or fp32
    out
        The packed buffer: contiguous, at least ``order.packed_elements``, type of `a`; for ``store="row_major"`` C
        itself, shape (m, n).  Padding is not written.
    order : tables and kernel; the tile's accumulate type is in ``order.config``
    counters : int32, shape (groups,), zero before the first call (`new_counters`); None counts nothing
    persistent : programs walk the tiles in order, `num_sms` of them; otherwise one program a tile
    num_sms : SMs that a persistent kernel takes; by default all of the device
    store : ``row_major`` leaves the order alone: what reordering costs is the difference
    tf32 : multiply fp32 on tensor cores, rounded to tf32; otherwise in full fp32

    Raises
    ------
    StrategyError
        If sizes, types, devices or the group table do not fit, bf16 is asked of the interpreter, or the kernel takes
        more shared memory than the GPU has.
    """
    raise NotImplementedError


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    expert_of_tile_row: Tensor,
    out: Tensor,
    order: TileOrder,
    counters: Tensor | None,
    *,
    persistent: bool = False,
    num_sms: int | None = None,
    store: Store = "reordered",
    tf32: bool = False,
) -> None:
    """As `signalled_gemm`, each row of tiles with the weights of its expert.

    Parameters
    ----------
    a : shape (m, k): rows of one expert stand together, padded to a multiple of ``order.config.bm``
    b : shape (experts, k, n)
    expert_of_tile_row : int32, shape (tile rows,); -1 computes nothing and stores zeros, but counts the tile
    out, order, counters, persistent, num_sms, store, tf32 : as in `signalled_gemm`

    Raises
    ------
    StrategyError
        As `signalled_gemm`, or if the experts' table does not fit.
    """
    raise NotImplementedError


def arrival_gemm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    order: ArrivalOrder,
    flags: Tensor,
    status: Tensor,
    *,
    expected: int = 1,
    num_sms: int | None = None,
    timeout_s: float = 10.0,
    tf32: bool = False,
) -> None:
    """Compute ``C = A B`` into row-major `out`, each tile as soon as the shards of A that it needs have arrived.

    The kernel is persistent on `num_sms` SMs: whatever fills A needs SMs or a copy engine of its own, or nothing
    arrives.  A shard has arrived once ``flags[shard]`` is `expected` (`raise_flag` behind its transfer).

    Parameters
    ----------
    a, b, out : shapes (m, k), (k, n) and (m, n)
    flags : int32, shape (shards,)
    status : of the shards, from `new_status`: a shard that did not arrive in time is in it, and its tiles are not valid
    expected : value that a flag reaches; counting up from call to call saves clearing the flags
    num_sms : SMs that the kernel takes; must leave some unless only copy engines fill A
    timeout_s : after which a program stops waiting

    Raises
    ------
    StrategyError
        As `signalled_gemm`, or if flags and status do not fit the shards.
    """
    raise NotImplementedError
