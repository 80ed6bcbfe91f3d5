"""fused_experts against recurrences worked out here, in both engines; stages, SMs, what stays a kernel, refusals."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapsim.strategies.fused_experts.kernel import arrivals, departures, kernel_of, staged, work_of

from overlapsim.cost.comm_ctas import comm_ctas_s
from overlapsim.cost.prices import PriceBook
from overlapsim.engine import compiled, reference
from overlapsim.errors import StrategyError
from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.candidates import propose
from overlapsim.planner.operator import build, simulate
from overlapsim.schedule.program import BLOCKS, FLOW
from overlapsim.step.blocks import simulate_piece
from overlapsim.strategy.base import Context
from overlapsim.strategy.chains import is_gemm, read_chain
from overlapsim.strategy.compose import Chosen, Composition
from overlapsim.strategy.fused import reserves
from overlapsim.strategy.registry import load_strategy
from overlapsim.strategy.tasks import CALL_S
from overlapsim.testing.cases import experts_graph
from overlapsim.units import ps_from_s
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.operators import CollectiveOp, GemmOp, KernelOp, OperatorGraph, gemm_and_collective

STRATEGY, SERIAL = load_strategy("fused_experts"), load_strategy("serial")
ENGINES = {"reference": reference, "compiled": compiled}
H800, H100 = (load_cluster(f"{name}-sxm8") for name in ("h800", "h100"))
ROWS = (1024, 1024)


def context(kind="all_gather", relation="before", rows=ROWS, n=2048, k=4096, ranks=8, cluster=H800, **book) -> Context:
    return Context(experts_graph(rows, n, k, kind, relation, ranks), PriceBook(cluster, ranks, **book))


def tasks(program, kind, word: str) -> list[int]:
    return [i for i in range(program.num_tasks) if program.kind[i] == kind and word in program.tag[i]]


def run_waves(gates: list[tuple[int, int]], units: int, sms: int, unit_ps: int, start: int) -> int:
    """End of a kernel whose CTAs take units in order, each unit waiting for the gates at or below it."""
    free = [start] * sms
    for unit in range(units):
        slot = min(range(sms), key=free.__getitem__)
        free[slot] = max(free[slot], max((at for first, at in gates if first <= unit), default=0)) + unit_ps
    return max(free)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("stages", [1, 2, 8])
def test_tiles_wait_for_the_ranks_of_their_rows(engine, stages) -> None:
    here = context()
    program = build(STRATEGY, here, {"tile": (128, 128), "stages": stages, "comm_sms": 0})
    timeline = ENGINES[engine].run(program, contention=False)
    (gemm,) = tasks(program, BLOCKS, "fused gemm")
    copies = [i for i in tasks(program, FLOW, "copy ") if "/" in program.tag[i]]
    # Eight rows of tiles an expert: one of each rank's tokens, sixteen columns.
    assert len(copies) == 7 and int(program.units[gemm]) == 2 * 8 * 16
    flag = ps_from_s(here.prices.flag_s)
    # Of eight ranks a stage has 8 / stages; own tokens are the first.
    gates = [
        (256 * stage // stages, int(timeline.t_end[copies[8 * (stage + 1) // stages - 2]]) + flag)
        for stage in range(stages)
        if 8 * (stage + 1) // stages > 1
    ]
    start = int(timeline.t_end[tasks(program, FLOW, "wait for own rows")[0]]) + ps_from_s(here.prices.signal_wait_s)
    expected = run_waves(gates, 256, 132, int(program.unit_ps[gemm]), start)
    assert timeline.t_end[gemm] == timeline.end_ps == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_an_exchange_by_experts_lets_the_first_go_ahead(engine) -> None:
    here = context("all_to_all", rows=(512, 1536))
    program = build(STRATEGY, here, {"tile": (128, 128), "stages": 2, "comm_sms": 12, "order": "experts"})
    timeline = ENGINES[engine].run(program, contention=False)
    (gemm,), (flow,) = tasks(program, BLOCKS, "fused gemm"), tasks(program, FLOW, "by 12 SMs")
    assert program.sm[flow] == 12 and program.sm[gemm] == 120
    chunk, start = int(program.unit_ps[flow]), int(timeline.t_start[flow])
    flag = ps_from_s(here.prices.flag_s)
    # A quarter of 32 pieces, and all of them.
    gates = [(0, start + 8 * chunk + flag), (4 * 16, start + 32 * chunk + flag)]
    expected = run_waves(gates, 16 * 16, 120, int(program.unit_ps[gemm]), int(timeline.t_resident[gemm]))
    assert timeline.t_end[gemm] == timeline.end_ps == expected


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("order", "stages"), [("ranks", 4), ("columns", 8)])
def test_parts_leave_as_they_are_done(engine, order, stages) -> None:
    here = context("reduce_scatter", "after")
    program = build(STRATEGY, here, {"tile": (128, 128), "stages": stages, "comm_sms": 30, "order": order})
    timeline = ENGINES[engine].run(program, contention=False)
    (gemm,), (flow,) = tasks(program, BLOCKS, "fused gemm"), tasks(program, FLOW, "by 30 SMs")
    wave, chunk, left = int(program.unit_ps[gemm]), int(program.unit_ps[flow]), 102
    # By ranks: seven others, two of eight in a stage of 64 tiles. By columns: two of sixteen in a panel of 32 tiles.
    needed = [64, 64, 128, 128, 192, 192, 256] if order == "ranks" else [32 * (panel + 1) for panel in range(8)]
    flag, sent = ps_from_s(here.prices.flag_s), 0
    for tiles in needed:
        sent = max(sent, math.ceil(tiles / left) * wave + flag) + chunk
    assert timeline.t_end[flow] == sent
    prices, size = here.prices, here.graph.operators[2].size_bytes
    summed = ps_from_s(prices.hbm_pass(size * 9 / 8)[0])
    assert timeline.end_ps == max(sent, math.ceil(256 / left) * wave) + ps_from_s(prices.barrier_s) + summed


def test_orders_read_what_they_must() -> None:
    chain = read_chain(context("all_to_all", "after", n=8192).graph)
    work = work_of(chain)
    point = {"tile": (128, 128), "stages": 2}
    by = {order: staged(work, chain, {**point, "order": order}) for order in ("experts", "columns")}
    by["ranks"] = staged(work, chain, {**point, "stages": 8})
    assert by["ranks"].work.rows == (128,) * 16 and by["experts"].work.rows == ROWS
    assert (by["columns"].work.rows, by["columns"].work.n) == (ROWS * 2, 4096)
    prices = PriceBook(H800, 8)
    once = prices.expert_gemm(work, (128, 128))
    for order, stages in by.items():
        kernel = kernel_of(prices, work, stages, point)
        assert kernel.grid.num_tiles == once.grid.num_tiles
        # The rows fit in L2 beside what streams through, the weights do not.
        assert (kernel.duration_s == once.duration_s) == (order != "ranks"), order


def test_ragged_experts_wait_for_the_last_rank_of_a_tile() -> None:
    # 96 tokens, twelve of each rank: one tile needs them all.
    chain = read_chain(context(rows=(96, 256)).graph)
    stages = staged(work_of(chain), chain, {"tile": (128, 128), "stages": 4})
    assert stages.tiles == (0, 16, 0, 32) and arrivals(chain, stages, {}) == [1, 3, 5, 7]
    back = read_chain(context("reduce_scatter", "after", rows=(96, 256)).graph)
    point = {"tile": (128, 128), "stages": 4}
    stages = staged(work_of(back), back, point)
    assert stages.tiles == (32, 0, 16, 0)
    assert departures(back, stages, point) == [32, 32, 32, 32, 48, 48, 48]


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.integers(0, 3000), min_size=1, max_size=9).filter(any),
    n=st.integers(16, 4000),
    stages=st.integers(1, 8),
    ranks=st.sampled_from([2, 3, 8]),
    where=st.sampled_from([("all_gather", "before"), ("all_to_all", "before"), ("all_to_all", "after")]),
    order=st.sampled_from(["ranks", "experts", "columns"]),
)
def test_stages_hold_every_tile_once_and_need_all_in_the_end(rows, n, stages, ranks, where, order) -> None:
    chain = read_chain(context(*where, rows=tuple(rows), n=n, ranks=ranks).graph)
    point = {"tile": (128, 128), "stages": stages, "order": order}
    most = {"ranks": ranks, "experts": sum(count > 0 for count in rows), "columns": -(-n // 128)}[order]
    if stages > most:
        with pytest.raises(StrategyError, match=f"1 to {most}"):
            staged(work_of(chain), chain, point)
        return
    cut = staged(work_of(chain), chain, point)
    row_tiles = sum(-(-count // 128) for count in rows)
    panels = stages * math.ceil(math.ceil(n / stages) / 128) if order == "columns" else math.ceil(n / 128)
    assert sum(cut.tiles) == row_tiles * panels and len(cut.tiles) == stages
    assert cut.share[-1] == pytest.approx(1.0) and all(a <= b for a, b in itertools.pairwise(cut.share))
    computed = cut.work.n * sum(cut.work.rows)
    assert computed >= n * sum(rows) and (order == "columns" or computed == n * sum(rows))
    if where[1] == "before" and order != "columns":
        needed = arrivals(chain, cut, point)
        pieces = ranks - 1 if order == "ranks" else 32
        assert needed[-1] == pieces and all(a <= b for a, b in itertools.pairwise(needed))
    if where[1] == "after":
        done = departures(chain, cut, point)
        assert all(a <= b for a, b in itertools.pairwise(done)) and done[-1] <= sum(cut.tiles)
        assert order == "ranks" or done[-1] == sum(cut.tiles)


def test_communicating_sms_are_priced_by_links_and_by_their_number() -> None:
    for kind, how in (("reduce_scatter", "registers"), ("all_to_all", "tma")):
        here = context(kind, "after")
        size = next(here.graph.of_type(CollectiveOp)).size_bytes
        sent, link_s = size * 7 / 8, here.prices.stores(next(here.graph.of_type(CollectiveOp))).seconds
        for sms in (10, 40):
            program = build(STRATEGY, here, {"tile": (128, 128), "stages": 4, "comm_sms": sms})
            (flow,) = tasks(program, FLOW, f"by {sms} SMs")
            moved_s = int(program.unit_ps[flow]) * int(program.units[flow]) / 1e12
            assert moved_s == pytest.approx(comm_ctas_s(link_s, sent, sms, how), rel=1e-6)


def test_reserves_leave_whole_waves() -> None:
    for tiles, sms in itertools.product((132, 500, 1024, 4096), (80, 108, 132)):
        choices = reserves(tiles, sms)
        assert choices and all(0 < c <= sms // 2 for c in choices)
        waves = [math.ceil(tiles / (sms - c)) for c in choices]
        assert all(math.ceil(tiles / (sms - c - 1)) > wave for c, wave in zip(choices, waves, strict=True) if wave > 2)


def test_row_moves_disappear_and_the_weights_gradient_stays() -> None:
    here = context("all_gather", "before")
    program = build(STRATEGY, here, {"tile": (128, 128), "stages": 2, "comm_sms": 0})
    assert not tasks(program, BLOCKS, "kernel")
    gather, _, experts = here.graph.operators
    backward = KernelOp(MemoryOp("moe_unpermute", 2048, 4096, pass_="bwd", topk=2), "moe.unpermute", "dgrad")
    graph = OperatorGraph((gather, backward, experts), ((0, 1), (1, 2)))
    program = build(STRATEGY, Context(graph, here.prices), {"tile": (128, 128), "stages": 2, "comm_sms": 0})
    timeline = compiled.run(program)
    ((kernel,), (gemm,)) = tasks(program, BLOCKS, "kernel"), tasks(program, BLOCKS, "fused gemm")
    last = [i for i in tasks(program, FLOW, "copy ") if "7/7" in program.tag[i]]
    assert timeline.t_start[kernel] >= timeline.t_end[last[0]] and timeline.t_start[gemm] < timeline.t_start[kernel]
    # What comes back by an exchange is added up at home.
    here = context("all_to_all", "after")
    program = build(STRATEGY, here, {"tile": (128, 128), "stages": 2, "comm_sms": 20})
    timeline = compiled.run(program)
    (kernel,) = tasks(program, BLOCKS, "kernel")
    assert timeline.t_end[kernel] == timeline.end_ps


def test_communicating_sms_are_not_held_before_the_kernel_runs() -> None:
    here = context("reduce_scatter", "after")
    program = build(STRATEGY, here, {"tile": (128, 128), "stages": 4, "comm_sms": 30})
    timeline = compiled.run(program)
    (gemm,), (flow,) = tasks(program, BLOCKS, "fused gemm"), tasks(program, FLOW, "by 30 SMs")
    assert timeline.t_resident[flow] >= timeline.t_start[gemm] + program.unit_ps[gemm]


def test_a_kernel_with_its_own_communication_is_launched_once() -> None:
    # So slow a host that nothing else counts: the framework's operators, and calls from within them.
    for here, point, operators, calls in (
        # Four of the kernel; wait lists; a sum of parts; the kernel that adds up copies.
        (context("all_to_all"), {"comm_sms": 12}, 1, 5),
        (context("reduce_scatter", "after"), {"comm_sms": 30}, 1, 5),
        (context("all_to_all", "after"), {"comm_sms": 30}, 2, 4),
        # Wait lists, two barriers, own rows, two for each of seven copies, and four of the kernel.
        (context(), {"comm_sms": 0}, 1, 22),
    ):
        chosen = Chosen(STRATEGY, {"tile": (128, 128), "stages": 2, **point})
        pairs = {(op.name, op.pass_): chosen for op in here.graph.operators if is_gemm(op)}
        seconds = simulate_piece(here, Composition(pairs=pairs), launch_s=1e-2).duration_s
        assert seconds == pytest.approx(operators * 1e-2 + calls * CALL_S, abs=1e-6)


def test_fused_beats_serial_where_both_sides_are_long() -> None:
    for kind, relation in itertools.product(("all_to_all", "gather"), ("before", "after")):
        kind = {"before": "all_gather", "after": "reduce_scatter"}[relation] if kind == "gather" else kind
        here = context(kind, relation, rows=(4096, 4096), n=8192, k=8192)
        best = min(
            simulate(STRATEGY, here, p.parameters).duration_s
            for p in itertools.islice(propose(STRATEGY.parameters(here)), 12)
        )
        longest = max(here.prices.operator_s(op) for op in here.graph.operators)
        assert longest < best < 0.9 * simulate(SERIAL, here, {}).duration_s


@pytest.mark.parametrize(
    ("here", "cause", "why"),
    [
        (context(ranks=1), "little_to_hide", "nothing to communicate"),
        (context(cluster=H100.with_nodes(2), ranks=16), "none", "span nodes"),
        (context(cluster=load_cluster("rtx4090-pcie8")), "none", "no peer-to-peer access"),
        (context("reduce_scatter", "after", rows=(64, 64), n=1024), "under_one_wave", "one wave"),
    ],
)
def test_refuses_with_reasons(here, cause, why) -> None:
    answer = STRATEGY.applies_to(here)
    assert not answer.applies and answer.cause == cause and why in "; ".join(answer.reasons)


def test_what_it_does_not_take_is_refused() -> None:
    here = context()
    plain = Context(gemm_and_collective(GemmOp(1024, 1024, 1024), "all_gather", 8), here.prices)
    assert "plain GEMM" in STRATEGY.applies_to(plain).reasons[0]
    gather, _, experts = here.graph.operators
    cast = KernelOp(MemoryOp("quantize_fp8", 2048, 4096), "moe.permute")
    other = Context(OperatorGraph((gather, cast, experts), ((0, 1), (1, 2))), here.prices)
    assert "more than to move rows" in STRATEGY.applies_to(other).reasons[0]
    summed = Context(OperatorGraph((replace(gather, kind="all_reduce"), experts), ((0, 1),)), here.prices)
    assert "all_reduce before" in STRATEGY.applies_to(summed).reasons[0]


def test_parameters_are_checked() -> None:
    gather, exchange = context(), context("all_to_all")
    scatter = context("reduce_scatter", "after")
    good = {"tile": (128, 128), "stages": 2, "comm_sms": 12}
    for here, wrong in (
        (gather, {"stages": 9}),
        (gather, {"order": "columns"}),
        (gather, {"order": "experts"}),
        (gather, {"comm_sms": 132}),
        (exchange, {"comm_sms": 0}),
        (exchange, {"order": "columns"}),
        (scatter, {"order": "experts"}),
        (scatter, {"tile": (128, 128, 64)}),
        (scatter, {"tile": (4, 4)}),
    ):
        with pytest.raises(StrategyError):
            build(STRATEGY, here, {**good, **wrong})
    assert STRATEGY.settings(scatter, {**good, "order": "columns", "stages": 8})["comm_tiles"] == 8
    assert STRATEGY.settings(gather, {**good, "comm_sms": 0})["transport"] == "copy_engine"
    # COMET's buffer: two bytes for each element of the tokens that are summed.
    assert STRATEGY.extra_memory_bytes(scatter, good) == pytest.approx(2 * 2048 * 2048, rel=1e-3)


def test_prices_of_a_grouped_kernel_keep_their_bound_and_ends() -> None:
    prices, work = PriceBook(H800, 8), work_of(read_chain(context().graph))
    cost = prices.expert_gemm(work)
    assert cost.duration_s == prices.kernel(context().graph.operators[2]).duration_s
    assert prices.expert_gemm(work, slowdown=1.1).duration_s == pytest.approx(1.1 * cost.duration_s)
    low, high = (prices.at("kernel", end).expert_gemm(work).duration_s for end in ("low", "high"))
    assert work.flop / H800.device.peak("bf16") <= low < cost.duration_s < high
    assert prices.at("kernel", "high").with_vendor_kernels().expert_gemm(work).duration_s == cost.duration_s
