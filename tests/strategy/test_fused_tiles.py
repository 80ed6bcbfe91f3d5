"""fused_tiles against recurrences worked out here, in both engines; refusals, parameters, host calls."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.accuracy.strategy_rows import time_s
from overlapsim.cost.prices import PriceBook
from overlapsim.engine import compiled, reference
from overlapsim.errors import StrategyError
from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.operator import build, simulate
from overlapsim.schedule.program import BLOCKS, FLOW
from overlapsim.strategy.base import Context
from overlapsim.strategy.registry import load_strategy
from overlapsim.units import ps_from_s
from overlapsim.workload.operators import CollectiveOp, GemmOp, OperatorGraph, gemm_and_collective

STRATEGY = load_strategy("fused_tiles")
ENGINES = {"reference": reference, "compiled": compiled}
H100, A800, H800 = (load_cluster(f"{name}-sxm8") for name in ("h100", "a800", "h800"))
NO_PEERS = load_cluster("rtx4090-pcie8")


def context(cluster=H100, kind="all_gather", m=4096, n=3072, k=4096, ranks=8, **book) -> Context:
    gemm = GemmOp(m, n, k)
    return Context(gemm_and_collective(gemm, kind, ranks), PriceBook(cluster, ranks, gemm=gemm, kind=kind, **book))


def gather(here: Context, **changes):
    shard = here.pair().gemm.m // here.pair().collective.ranks
    return {"tile": (128, 256, 64), "comm_rows": shard, "transport": "copy_engine", **changes}


def tasks(program, kind, word: str) -> list[int]:
    return [i for i in range(program.num_tasks) if program.kind[i] == kind and word in program.tag[i]]


def waves_ps(units: int, gates: list[tuple[int, int]], start: int, sms: int, unit_ps: int) -> int:
    """End of a kernel whose CTAs take units in order, each unit waiting for the gates at or below it."""
    free = [start] * sms
    for unit in range(units):
        slot = min(range(sms), key=free.__getitem__)
        open_at = max((at for first, at in gates if first <= unit), default=0)
        free[slot] = max(free[slot], open_at) + unit_ps
    return max(free)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize("shape", [(4096, 1536, 2048), (2048, 512, 14336)])
def test_gather_follows_its_recurrence_in_both_engines(engine, shape, split) -> None:
    m, n, k = shape
    here = context(m=m, n=n, k=k)
    program = build(STRATEGY, here, gather(here, comm_rows=m // 8 // split))
    timeline = ENGINES[engine].run(program, contention=False)
    (gemm,) = tasks(program, BLOCKS, "fused gemm")
    copies = [i for i in tasks(program, FLOW, "copy ") if "/" in program.tag[i]]
    assert len(copies) == 7 * split
    prices = here.prices
    before = ps_from_s(prices.barrier_s) * 2 + ps_from_s(prices.hbm_pass(2 * m * k * 2 / 8)[0])
    piece = ps_from_s(prices.copies(CollectiveOp("all_gather", m * k * 2.0, 8), 7 * split)[0])
    arrivals = [before + piece * (number + 1) for number in range(7 * split)]
    assert timeline.t_end[copies].tolist() == arrivals
    rows = [m // 8 + (m - m // 8) * piece / (7 * split) for piece in range(7 * split)]
    columns = math.ceil(n / 256)
    flag = ps_from_s(832e-9)
    gates = [(int(row / 128) * columns, at + flag) for row, at in zip(rows, arrivals, strict=True)]
    start = before + ps_from_s(prices.signal_wait_s)
    expected = waves_ps(int(program.units[gemm]), gates, start, 132, int(program.unit_ps[gemm]))
    assert timeline.t_end[gemm] == timeline.end_ps == expected
    # Own rows are computed while the first copy is on its way.
    assert timeline.t_start[gemm] == start < arrivals[0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("transport", "split", "kind"),
    [
        ("stores", 1, "reduce_scatter"),
        ("stores", 8, "reduce_scatter"),
        ("copy_engine", 2, "reduce_scatter"),
        ("stores", 1, "all_reduce"),
    ],
)
def test_scatter_follows_its_recurrence_in_both_engines(engine, transport, split, kind) -> None:
    here = context(kind=kind, m=4096, n=3072, k=1024)
    program = build(STRATEGY, here, gather(here, comm_rows=512 // split, transport=transport))
    timeline = ENGINES[engine].run(program, contention=False)
    (gemm,) = tasks(program, BLOCKS, "fused gemm")
    prices, op = here.prices, here.pair().collective
    unit_ps, pieces = int(program.unit_ps[gemm]), 7 * split
    end = timeline.t_end[gemm]
    assert end == math.ceil(32 * 12 / 132) * unit_ps
    if transport == "stores":
        piece, lag, sent = ps_from_s(prices.stores(op).seconds / pieces), 0, ps_from_s(prices.barrier_s)
    else:
        shares = CollectiveOp("all_gather", op.size_bytes, 8)
        piece, lag, sent = ps_from_s(prices.copies(shares, pieces)[0]), ps_from_s(832e-9), ps_from_s(prices.barrier_s)
    for number in range(pieces):
        tiles = math.ceil(3584 * (number + 1) / pieces / 128) * 12
        sent = max(sent, math.ceil(tiles / 132) * unit_ps + lag) + piece
    total = max(sent, end) + ps_from_s(prices.barrier_s) + ps_from_s(prices.hbm_pass(op.size_bytes * 9 / 8)[0])
    if kind == "all_reduce":
        copy = prices.copies(CollectiveOp("all_gather", op.size_bytes, 8), 7)[0]
        total += ps_from_s(prices.barrier_s) + 7 * ps_from_s(copy)
    assert timeline.end_ps == total


def test_stores_take_time_of_an_sm_where_one_cta_owns_it() -> None:
    hopper, ampere = context(kind="reduce_scatter"), context(A800, kind="reduce_scatter")
    spent = {}
    for here, name in ((hopper, "hopper"), (ampere, "ampere")):
        for transport in ("stores", "copy_engine"):
            program = build(STRATEGY, here, gather(here, transport=transport))
            (gemm,) = tasks(program, BLOCKS, "fused gemm")
            spent[name, transport] = int(program.units[gemm] * program.unit_ps[gemm]) / 1e12
    sent = 4096 * 3072 * 2 * 7 / 8
    # 15 SMs store at 78 % of 450 GB/s; storing at home is part of every kernel.
    extra = sent * (15 / (0.78 * 450e9) - 1 / (96 * 1.83e9))
    assert spent["hopper", "stores"] - spent["hopper", "copy_engine"] == pytest.approx(extra, rel=1e-4)
    assert spent["ampere", "stores"] == spent["ampere", "copy_engine"]


def test_measured_kernel_is_taken_as_it_is_and_flags_are_read_before_hopper() -> None:
    for cluster, flag_s in ((H100, 0.0), (A800, 832e-9)):
        here = context(cluster, kernel_time_s={"fused_tiles": 1e-3}, tile=(128, 256, 64))
        program = build(STRATEGY, here, gather(here))
        (gemm,) = tasks(program, BLOCKS, "fused gemm")
        waves = math.ceil(384 / here.prices.cluster.device.num_sms)
        assert waves * program.unit_ps[gemm] / 1e12 == pytest.approx(1e-3 + waves * flag_s, rel=1e-9)


def test_an_unmeasured_template_is_no_faster_than_the_library_nor_than_its_sms() -> None:
    for cluster, (m, n, k) in itertools.product((A800, H100), ((2048, 3584, 8192), (8192, 8192, 4096))):
        here = context(cluster, m=m, n=n, k=k)
        gemm, device = here.pair().gemm, cluster.device
        for tile in here.prices.kernel_tiles(gemm, "fused_tiles"):
            program = build(STRATEGY, here, gather(here, tile=tile))
            (task,) = tasks(program, BLOCKS, "fused gemm")
            assert program.unit_ps[task] / 1e12 >= 2 * tile[0] * tile[1] * k / device.peak("bf16") * device.num_sms * (
                1 - 1e-9
            )
        best = STRATEGY.parameters(here).grid["tile"][0]
        slow = here.prices.kernel_gemm(gemm, "fused_tiles", best, slowdown=1.0).duration_s
        assert slow >= here.prices.vendor_gemm(gemm).duration_s * (1 - 1e-9)
        triton = here.prices.kernel_gemm(gemm, "fused_tiles", best, slowdown=1.03).duration_s
        assert 1 <= triton / slow <= 1.03 * (1 + 1e-9)


def test_small_comm_tiles_arrive_sooner_and_cost_their_starts() -> None:
    here = context(H800, m=8192, n=512, k=4096)
    last, first = [], []
    for split in (1, 2, 8):
        program = build(STRATEGY, here, gather(here, comm_rows=1024 // split))
        timeline = compiled.run(program, contention=False)
        copies = [i for i in tasks(program, FLOW, "copy ") if "/" in program.tag[i]]
        first.append(timeline.t_end[copies[0]])
        last.append(timeline.t_end[copies[-1]])
    assert first[0] > first[1] > first[2]
    assert np.diff(last).tolist() == pytest.approx([7 * 3e6, 7 * 6 * 3e6], rel=1e-4)


def test_gathered_rows_are_copied_out_when_asked_for() -> None:
    here = context()
    plain, kept = (
        simulate(STRATEGY, here, gather(here, keep_gathered=keep), contention=False).duration_s
        for keep in (False, True)
    )
    assert kept - plain == pytest.approx(here.prices.hbm_pass(2 * 4096 * 4096 * 2)[0], rel=1e-6)
    memory = [STRATEGY.extra_memory_bytes(here, gather(here, keep_gathered=keep)) for keep in (False, True)]
    assert memory[1] - memory[0] == 4096 * 4096 * 2


def test_a_host_that_launches_pays_for_every_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlapsim.strategy.tasks.CALL_S", 1e-3)
    here = context(kind="reduce_scatter", m=2048, n=2048, k=512)
    # So slow a host that nothing else counts: kernel and 4, two barriers, two calls a copy, sum and 6.
    for split in (1, 2):
        point = gather(here, comm_rows=256 // split)
        assert time_s(STRATEGY, here, point, 1e-3) == pytest.approx((5 + 2 + 2 * 7 * split + 7) * 1e-3, rel=0.02)
    stores = gather(here, transport="stores")
    assert time_s(STRATEGY, here, stores, 1e-3) == pytest.approx((5 + 2 + 7) * 1e-3, rel=0.02)


@pytest.mark.parametrize(
    ("here", "cause", "why"),
    [
        (context(ranks=1), "little_to_hide", "nothing to communicate"),
        (context(H100.with_nodes(2), ranks=16), "none", "span nodes of 8 GPUs"),
        (context(kind="all_to_all"), "none", "no fused kernel for all_to_all"),
        (context(kind="reduce_scatter", m=128, n=2048), "under_one_wave", "one wave: no tile is sent"),
        (context(NO_PEERS), "none", "no peer-to-peer access"),
        (context(NO_PEERS, kind="reduce_scatter", m=64, n=2048), "under_one_wave", "one wave"),
        (context(m=4), "few_tiles", "ranks without rows"),
    ],
)
def test_refuses_with_reasons(here, cause, why) -> None:
    answer = STRATEGY.applies_to(here)
    assert not answer.applies and answer.cause == cause and why in "; ".join(answer.reasons)


def test_one_wave_is_no_reason_to_refuse_a_gather() -> None:
    here = context(H800, m=8192, n=512, k=14336)
    assert all(
        here.prices.kernel_gemm(here.pair().gemm, "fused_tiles", tile, slowdown=1.0).grid.num_tiles <= 132
        for tile in [(128, 256, 64)]
    )
    assert STRATEGY.applies_to(here).applies


def test_an_independent_pair_is_refused() -> None:
    here = context(kind="reduce_scatter")
    answer = STRATEGY.applies_to(Context(OperatorGraph(here.graph.operators), here.prices))
    assert not answer.applies and "independent" in answer.reasons[0]


def test_parameters_are_checked() -> None:
    here = context()
    for wrong in ({"comm_rows": 513}, {"transport": "smoke"}, {"template": "hand"}, {"tile": (128, 256)}):
        with pytest.raises(StrategyError):
            build(STRATEGY, here, gather(here, **wrong))
    settings_ = STRATEGY.settings(here, gather(here, comm_rows=128))
    assert (settings_["comm_tiles"], settings_["row_order"]) == (28, "own_first")
    with_time = context(kernel_time_s={"fused_tiles": 1e-3})
    codes = [f.code for f in STRATEGY.findings(with_time, gather(with_time))]
    assert codes == ["transport_assumed"]
    assert [f.code for f in STRATEGY.findings(here, gather(here))] == ["kernel_time_assumed", "transport_assumed"]


@settings(deadline=None, max_examples=25)
@given(
    m=st.integers(64, 6000),
    n=st.integers(64, 4000),
    ranks=st.sampled_from([2, 3, 8]),
    kind=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    transport=st.sampled_from(["stores", "copy_engine"]),
    split=st.integers(1, 5),
)
def test_any_shape_ends_and_never_below_kernel_or_bytes(m, n, ranks, kind, transport, split) -> None:
    here = context(kind=kind, m=m, n=n, k=1024, ranks=ranks)
    if kind == "all_gather":
        transport = "copy_engine"
    point = gather(here, comm_rows=math.ceil(math.ceil(m / ranks) / split), transport=transport)
    seconds = simulate(STRATEGY, here, point).duration_s
    kernel = here.prices.kernel_gemm(here.pair().gemm, "fused_tiles", (128, 256, 64), slowdown=1.0)
    moved = here.pair().collective.size_bytes * (ranks - 1) / ranks / 450e9
    assert seconds >= max(kernel.duration_s, moved) * (1 - 1e-9)
    # Without contention: slow copies leave the kernel more of the memory's rate.
    slower = replace(here, prices=here.prices.scaled("collective", 3.0))
    alone, longer = (simulate(STRATEGY, each, point, contention=False).duration_s for each in (here, slower))
    assert longer >= alone * (1 - 1e-9)
