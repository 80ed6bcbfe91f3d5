"""Questions that users asked in public about fused tile kernels."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from overlapsim.accuracy.strategy_rows import time_s
from overlapsim.cli.main import main
from overlapsim.cost.launch import launch_stack
from overlapsim.cost.prices import PriceBook
from overlapsim.hardware.loading import load_cluster
from overlapsim.strategy.base import Context
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.operators import GemmOp, gemm_and_collective

FUSED, SERIAL = load_strategy("fused_tiles"), load_strategy("serial")


def asked(cluster, kind: str, m: int, n: int, k: int, ranks: int, dtype: str = "bf16") -> Context:
    gemm = GemmOp(m, n, k, dtype)
    return Context(gemm_and_collective(gemm, kind, ranks), PriceBook(cluster, ranks, gemm=gemm, kind=kind))


# bytedance/flux issue 111: 4 x RTX 4090, M 64, N 28672, K 8192, TP 4, fp16.


@pytest.mark.parametrize(
    ("collective", "n", "k"), [("all_gather", 7168, 8192), ("reduce_scatter", 8192, 7168)], ids=["gather", "scatter"]
)
def test_small_m_on_4090_is_not_overlapped(capsys, collective: str, n: int, k: int) -> None:
    main(
        f"operator --cluster rtx4090-pcie8 --ranks 4 --m 64 --n {n} --k {k} --dtype fp16 --collective {collective} "
        "--json".split()
    )
    answer = json.loads(capsys.readouterr().out)
    assert (answer["verdict"], answer["best"]) == ("serial", "serial")
    fused = next(entry for entry in answer["strategies"] if entry["name"] == "fused_tiles")
    assert not fused["applies"]
    if collective == "reduce_scatter":
        assert answer["cause"] == "under_one_wave"


def test_with_peer_access_the_gather_gains_by_smaller_tiles_alone() -> None:
    """Published: 0.240 ms with 56 tiles of 64x128, 0.201 with 32x64, against 0.213 unfused: a loss becomes a tie."""
    stock = load_cluster("rtx4090-pcie8")
    here = asked(replace(stock, node=replace(stock.node, p2p=True)), "all_gather", 64, 7168, 8192, 4, "fp16")
    large, small = (
        time_s(FUSED, here, {"tile": tile, "comm_rows": 16, "transport": "copy_engine"}, 0.0)
        for tile in ((64, 128, 64), (32, 64, 64))
    )
    assert large * 1e3 == pytest.approx(0.240, rel=0.1)
    assert small * 1e3 == pytest.approx(0.201, rel=0.1)
    assert large > 0.213e-3 > small
    # The scatter stays refused: one wave whatever the tile of the list.
    scatter = asked(replace(stock, node=replace(stock.node, p2p=True)), "reduce_scatter", 64, 8192, 7168, 4, "fp16")
    assert FUSED.applies_to(scatter).cause == "under_one_wave"


# ByteDance-Seed/Triton-distributed pull request 166: GEMM + ReduceScatter on H100, from Python; fused over library, ms.
REPORTED = {(4096, 4): (0.286, 0.205), (4096, 8): (0.323, 0.167), (8192, 8): (0.855, 1.045)}
SHAPES = {4096: (4096, 8192), 8192: (8192, 29568)}


def test_the_crossover_of_fused_gemm_and_scatter_on_h100(capsys) -> None:
    cluster, host_s = load_cluster("h100-sxm8"), launch_stack("eager").host_s
    speedups = {}
    for (m, (n, k)), ranks in ((entry, ranks) for entry in SHAPES.items() for ranks in (2, 4, 8)):
        here = asked(cluster, "reduce_scatter", m, n, k // ranks, ranks)
        serial_s = time_s(SERIAL, here, {}, host_s)
        fused_s = min(
            time_s(
                FUSED,
                here,
                {"tile": tile, "comm_rows": m // ranks, "transport": "copy_engine", "template": "triton"},
                host_s,
            )
            for tile in ((128, 128, 64), (128, 256, 64))
        )
        speedups[m, ranks] = serial_s / fused_s
        with capsys.disabled():
            reported = REPORTED.get((m, ranks))
            text = f", reported {reported[0]} and {reported[1]}" if reported else ""
            print(f"\n{m} x {n} x {k} on {ranks}: {fused_s * 1e3:.3f} ms fused, {serial_s * 1e3:.3f} in series{text}")
    for cell, (fused_ms, library_ms) in REPORTED.items():
        assert (speedups[cell] > 1) == (library_ms > fused_ms), cell
    # More ranks leave less to compute and as many host calls more: the gain of the small shape falls.
    assert speedups[4096, 2] > speedups[4096, 4] > speedups[4096, 8]
    # With a host that runs ahead it is not the kernel that loses.
    here = asked(cluster, "reduce_scatter", 4096, 4096, 1024, 8)
    point = {"tile": (128, 128, 64), "comm_rows": 512, "transport": "copy_engine", "template": "triton"}
    assert time_s(FUSED, here, point, 0.0) < time_s(SERIAL, here, {}, 0.0)
