"""Kernels that the compile matrix builds: those that plans run, each in the specialisation that a launch gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from overlapsim.validate.kernels.add import add_kernel
from overlapsim.validate.kernels.arrival import arrival_kernel
from overlapsim.validate.kernels.compiling import TYPE_NAMES, Variant
from overlapsim.validate.kernels.config import GemmConfig
from overlapsim.validate.kernels.gemm import gemm_kernel
from overlapsim.validate.kernels.hold import FILL, WARPS, hold_kernel
from overlapsim.validate.kernels.rmsnorm import rmsnorm_kernel
from overlapsim.validate.kernels.wait import flag_kernel, wait_kernel

_UNIT_STRIDES: Final = {"stride_ak": 1, "stride_bn": 1, "stride_on": 1}
_TABLES: Final = {
    **dict.fromkeys(("tile_ptr", "group_ptr", "counter_ptr", "part_ptr", "index_ptr", "expert_ptr"), "*i32"),
    "slab_ptr": "*i64",
}
_COUNTS: Final = frozenset({"num_tiles", "grid_n"})


def gemm_variant(
    config: GemmConfig,
    dtype: str,
    *,
    by_row: bool = False,
    experts: bool = False,
    persistent: bool = False,
    ragged: bool = False,
) -> Variant:
    """Signalled GEMM with row-major operands.

    Parameters
    ----------
    by_row : rows of a tile go to several ranks (reduce_scatter, all_to_all)
    ragged : M, N and K are multiples of nothing
    """
    told = [name for name, on in (("by row", by_row), ("experts", experts), ("persistent", persistent)) if on]
    # A dimension of a ragged problem is one of its strides too, and so is no multiple of 16 either.
    loose = {"m", "n", "k", "stride_am", "stride_bk", "stride_be", "stride_om"} if ragged else set()
    return Variant(
        name=f"gemm {_label(config, dtype)}{''.join(f', {word}' for word in told)}{', ragged' if ragged else ''}",
        kernel=gemm_kernel,
        pointers={**dict.fromkeys(("a_ptr", "b_ptr", "out_ptr"), TYPE_NAMES[dtype]), **_TABLES},
        constants={
            **_UNIT_STRIDES,
            **_shape(config, dtype, ragged),
            # Packed rows are not stored through strides.
            **{"stride_om": 0, "stride_on": 0},
            "EXPERTS": experts,
            "PACKED": True,
            "BY_ROW": by_row,
            "ALIGNED": not ragged,
            "COUNTED": True,
            "PERSISTENT": persistent,
        },
        unaligned=_COUNTS | loose,
        warps=config.num_warps,
        stages=config.stages,
    )


def arrival_variant(config: GemmConfig, dtype: str) -> Variant:
    """GEMM behind the arrival of its input."""
    return Variant(
        name=f"arrival gemm {_label(config, dtype)}",
        kernel=arrival_kernel,
        pointers={
            **dict.fromkeys(("a_ptr", "b_ptr", "out_ptr"), TYPE_NAMES[dtype]),
            **dict.fromkeys(("tile_ptr", "flag_ptr", "status_ptr"), "*i32"),
        },
        constants={**_UNIT_STRIDES, **_shape(config, dtype, False), "CLOCK": True},
        unaligned=_COUNTS | {"shard_rows", "expected", "timeout_us", "max_polls"},
        warps=config.num_warps,
        stages=config.stages,
    )


def small_variants() -> tuple[Variant, ...]:
    """Wait, flag, holder and consumers."""
    polled = frozenset({"group", "expected", "timeout_us", "max_polls", "index", "value"})
    consumer = {
        **dict.fromkeys(("packed_ptr", "weight_ptr", "residual_ptr", "sum_ptr", "out_ptr"), "*bf16"),
        **dict.fromkeys(("row_slab_ptr", "row_place_ptr"), "*i32"),
        "slab_ptr": "*i64",
    }
    restored = {"BN": 128, "ALIGNED": True, "ADDED": True}
    signals = {"counter_ptr": "*i32", "status_ptr": "*i32"}
    holder = dict.fromkeys(("started_ptr", "stop_ptr", "filler_ptr"), "*i32")
    return (
        Variant("wait", wait_kernel, signals, {"REARM": True, "CLOCK": True}, polled, warps=1, stages=1),
        Variant("wait, kept", wait_kernel, signals, {"REARM": False, "CLOCK": True}, polled, warps=1, stages=1),
        Variant("flag", flag_kernel, {"flag_ptr": "*i32"}, {}, polled, warps=1, stages=1),
        Variant("hold", hold_kernel, holder, {"FILL": FILL, "CLOCK": True}, polled, warps=WARPS, stages=1),
        *(
            Variant(
                name=f"rmsnorm {tiles * 128} wide{'' if whole else ', in parts'}",
                kernel=rmsnorm_kernel,
                pointers=consumer,
                constants={**restored, "TILES": tiles, "ONE_PART": whole},
                unaligned=frozenset({"grid_n"}),
                floats=frozenset({"eps"}),
                warps=warps,
                stages=1,
            )
            for tiles, whole, warps in ((128, True, 16), (32, False, 4))
        ),
        Variant("add", add_kernel, consumer, {**restored, "TILES": 32}, frozenset({"grid_n"}), warps=4, stages=1),
    )


def default_variants() -> tuple[Variant, ...]:
    """Kernels that must compile, fit and signal on every architecture."""
    small, tall, wide = GemmConfig(128, 128, 64), GemmConfig(256, 128, 64), GemmConfig(128, 256, 64)
    return (
        gemm_variant(small, "bf16"),
        gemm_variant(small, "bf16", ragged=True),
        gemm_variant(tall, "bf16", by_row=True, persistent=True),
        gemm_variant(GemmConfig(256, 128, 64, accumulate="fp16"), "fp16"),
        gemm_variant(wide, "fp16", persistent=True),
        gemm_variant(GemmConfig(64, 64, 32), "fp32"),
        gemm_variant(GemmConfig(128, 128, 32), "tf32"),
        gemm_variant(small, "bf16", by_row=True, experts=True),
        arrival_variant(small, "bf16"),
        *small_variants(),
    )


def _shape(config: GemmConfig, dtype: str, ragged: bool) -> Mapping[str, Any]:
    return {
        "BM": config.bm,
        "BN": config.bn,
        "BK": config.bk,
        "EVEN_K": not ragged,
        "HALF_SUM": config.accumulate == "fp16",
        "PRECISION": "tf32" if dtype == "tf32" else "ieee",
    }


def _label(config: GemmConfig, dtype: str) -> str:
    half = " summed in fp16" if config.accumulate == "fp16" else ""
    return f"{dtype}{half} {config.bm}x{config.bn}x{config.bk}, {config.stages} stages"
