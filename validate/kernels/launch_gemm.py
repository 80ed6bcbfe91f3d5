"""GEMM kernels as functions: signalled and reordered, by experts, and behind the arrival of its input."""

from __future__ import annotations

from typing import Any, Literal

import torch
from overlapsim.validate.kernels.arrival import arrival_kernel
from overlapsim.validate.kernels.arrival_order import ArrivalOrder
from overlapsim.validate.kernels.checks import (
    INTERPRETED,
    INTERPRETER_POLLS,
    check_floats,
    check_int32,
    check_packed,
    check_place,
    check_shape,
    device_sms,
    launch,
    timeout_us,
)
from overlapsim.validate.kernels.config import GemmConfig
from overlapsim.validate.kernels.gemm import gemm_kernel
from overlapsim.validate.kernels.tile_order import TileOrder
from torch import Tensor

from overlapsim.errors import StrategyError

Store = Literal["packed", "row_major"]


def signalled_gemm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    order: TileOrder,
    counters: Tensor | None,
    *,
    persistent: bool = False,
    num_sms: int | None = None,
    store: Store = "packed",
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
    order : tables and kernel; the type that products are summed in is ``order.config.accumulate``
    counters : int32, shape (groups,), zero before the first call (`new_counters`); None counts nothing
    persistent : programs walk the tiles in order, `num_sms` of them; otherwise one program a tile
    num_sms : SMs that a persistent kernel takes; by default all of the device
    store : ``row_major`` stores C as usual: what reordering costs is the difference
    tf32 : multiply fp32 on tensor cores, rounded to tf32; otherwise in full fp32

    Raises
    ------
    StrategyError
        If sizes, types or devices do not fit, bf16 is asked of the interpreter, or the kernel takes more shared memory
        than the GPU has.
    """
    grid = order.grid
    k = _inner(a, b)
    check_shape("B", b, (k, grid.n))
    _launch(a, b, None, 0, out, order, counters, persistent, num_sms, store, tf32)


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
    store: Store = "packed",
    tf32: bool = False,
) -> None:
    """As `signalled_gemm`, each row of tiles with the weights of its expert.

    Parameters
    ----------
    a : shape (m, k): rows of one expert stand together, padded to a multiple of ``order.config.bm``
    b : shape (experts, k, n)
    expert_of_tile_row
        int32, shape (tile rows,), each less than the experts (not checked: it stands on the device); a negative one
        computes nothing and stores zeros, but its tiles count
    out, order, counters, persistent, num_sms, store, tf32 : as in `signalled_gemm`

    Raises
    ------
    StrategyError
        As `signalled_gemm`, or if the experts' table does not fit.
    """
    k = _inner(a, b)
    check_shape("B", b, (b.shape[0], k, order.grid.n))
    check_place(a, expert_of_tile_row)
    check_int32("experts of tile rows", expert_of_tile_row, order.grid.grid_m)
    _launch(a, b, expert_of_tile_row, b.stride(0), out, order, counters, persistent, num_sms, store, tf32)


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
    arrives.  A shard has arrived once ``flags[shard]`` is at least `expected` (`raise_flag` behind its transfer).

    Parameters
    ----------
    a, b, out : shapes (m, k), (k, n) and (m, n), any strides
    flags : int32, shape (shards,)
    status
        Of the shards, from `new_status` or zeroed: a shard that did not arrive in time is in it, its tiles are not
        valid, and nobody waits for it again until the status is zeroed
    expected : value that a flag reaches, above 0; counting up from call to call saves clearing the flags
    num_sms : SMs that the kernel takes, by default all but one; leave as many as the transfers need
    timeout_s : after which a program stops waiting

    Raises
    ------
    StrategyError
        As `signalled_gemm`, or if flags and status do not fit the shards.
    """
    grid, config = order.grid, order.config
    k = _inner(a, b)
    check_place(a, b, out, flags, status, order.tile_of_slot)
    _check_operands(a, b, out, config, tf32)
    check_shape("A", a, (grid.m, k))
    check_shape("B", b, (k, grid.n))
    check_shape("out", out, (grid.m, grid.n))
    check_int32("flags", flags, order.num_shards)
    check_int32("status", status, 2 * order.num_shards)
    if expected < 1:
        raise StrategyError(f"flags are expected to reach {expected}; expected a value above 0")
    programs = _programs(grid.num_tiles, a, True, max(1, device_sms(a) - 1) if num_sms is None else num_sms)
    launch(
        arrival_kernel,
        (programs,),
        (
            *(a, b, out, order.tile_of_slot, flags, status, grid.num_tiles, grid.grid_n, grid.m, grid.n, k),
            *(*a.stride(), *b.stride(), *out.stride(), order.shard_rows),
            *(expected, timeout_us(timeout_s), INTERPRETER_POLLS),
        ),
        {**_shape(config, k, a, tf32), "CLOCK": not INTERPRETED},
        a.device,
    )


def _launch(
    a: Tensor,
    b: Tensor,
    experts: Tensor | None,
    expert_stride: int,
    out: Tensor,
    order: TileOrder,
    counters: Tensor | None,
    persistent: bool,
    num_sms: int | None,
    store: Store,
    tf32: bool,
) -> None:
    grid, config = order.grid, order.config
    k = a.shape[1]
    check_shape("A", a, (grid.m, k))
    check_place(a, b, out, order.tile_of_slot, *(() if counters is None else (counters,)))
    _check_operands(a, b, out, config, tf32)
    if store == "packed":
        check_packed(out, order.packed_elements)
    elif store == "row_major":
        check_shape("out", out, (grid.m, grid.n))
    else:
        raise StrategyError(f"store is {store!r}; expected packed or row_major")
    if counters is not None:
        check_int32("counters", counters, order.num_groups)
    unused = order.tile_of_slot
    out_strides = out.stride() if store == "row_major" else (0, 0)
    launch(
        gemm_kernel,
        (_programs(grid.num_tiles, a, persistent, num_sms),),
        (
            *(a, b, out, order.tile_of_slot, order.group_of_slot),
            *(unused if counters is None else counters, order.slab_start),
            *(unused if order.row_part is None else order.row_part,),
            *(unused if order.row_index is None else order.row_index, unused if experts is None else experts),
            *(grid.num_tiles, grid.grid_n, grid.m, grid.n, k),
            *(*a.stride(), expert_stride, *b.stride()[-2:], *out_strides),
        ),
        {
            **_shape(config, k, a, tf32),
            "EXPERTS": experts is not None,
            "PACKED": store == "packed",
            "BY_ROW": order.row_part is not None,
            "ALIGNED": order.aligned,
            "COUNTED": counters is not None,
            "PERSISTENT": persistent,
        },
        a.device,
    )


def _inner(a: Tensor, b: Tensor) -> int:
    if a.dim() != 2 or b.dim() not in (2, 3) or b.shape[-2] != a.shape[1] or not a.shape[1]:
        raise StrategyError(
            f"A of shape {tuple(a.shape)} and B of shape {tuple(b.shape)}; expected (m, k) and (k, n), or "
            "(experts, k, n), with k of at least 1"
        )
    return int(a.shape[1])


def _check_operands(a: Tensor, b: Tensor, out: Tensor, config: GemmConfig, tf32: bool) -> None:
    check_floats("A, B and out", a, b, out)
    if config.accumulate == "fp16" and a.dtype != torch.float16:
        raise StrategyError(f"{a.dtype} operands summed in fp16; expected fp16 operands or accumulate fp32")
    for what, tensor, rows, columns in (("A", a, config.bm, config.bk), ("B", b, config.bk, config.bn)):
        span = (rows - 1) * tensor.stride(-2) + (columns - 1) * tensor.stride(-1)
        if not 0 <= span < 2**31 or min(tensor.stride()) < 0:
            raise StrategyError(
                f"{what} with strides {tensor.stride()}: a piece of {rows}x{columns} spans {span} elements; expected "
                "less than 2^31: make it contiguous"
            )
    if tf32 and a.dtype != torch.float32:
        raise StrategyError(f"tf32 with operands of {a.dtype}; expected fp32 tensors")


def _programs(num_tiles: int, a: Tensor, persistent: bool, num_sms: int | None) -> int:
    if not persistent:
        if num_sms is not None:
            raise StrategyError(
                f"num_sms is {num_sms} for a kernel of one program a tile; only a persistent kernel can leave SMs free"
            )
        return num_tiles
    sms = device_sms(a) if num_sms is None else num_sms
    if sms < 1:
        raise StrategyError(f"a persistent kernel on {sms} SMs; expected at least 1")
    return min(sms, num_tiles)


def _shape(config: GemmConfig, k: int, a: Tensor, tf32: bool) -> dict[str, Any]:
    return {
        "BM": config.bm,
        "BN": config.bn,
        "BK": config.bk,
        "EVEN_K": k % config.bk == 0,
        "HALF_SUM": config.accumulate == "fp16",
        "PRECISION": "tf32" if tf32 else "ieee",
        "num_warps": config.num_warps,
        "num_stages": config.stages,
    }
