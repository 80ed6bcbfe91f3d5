"""fused_exchange against recurrences worked out here, in both engines; what changes sides, refusals, parameters."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.prices import PriceBook
from overlapsim.engine import compiled, reference
from overlapsim.errors import StrategyError
from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.operator import build, simulate
from overlapsim.schedule.program import BLOCKS, FLOW
from overlapsim.strategy.base import Context
from overlapsim.strategy.registry import load_strategy
from overlapsim.units import ps_from_s
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.operators import CollectiveOp, GemmOp, KernelOp, OperatorGraph

STRATEGY = load_strategy("fused_exchange")
ENGINES = {"reference": reference, "compiled": compiled}
H800, H100 = (load_cluster(f"{name}-sxm8") for name in ("h800", "h100"))
TILE = (128, 128, 64)


def context(relation="after", m=1024, n=6144, k=4096, ranks=8, cluster=H800, rope=False, **book) -> Context:
    gemm = GemmOp(m, n, k, name="attn.qkv")
    width = n if relation == "after" else k
    exchange = CollectiveOp("all_to_all", 2.0 * m * width, ranks, name="attn.core", group="sp")
    between = [KernelOp(MemoryOp("rope", m, width), "attn.rope")] if rope else []
    operators = [gemm, *between, exchange] if relation == "after" else [exchange, *between, gemm]
    edges = tuple((i, i + 1) for i in range(len(operators) - 1))
    return Context(OperatorGraph(tuple(operators), edges), PriceBook(cluster, ranks, **book))


def tasks(program, kind, word: str) -> list[int]:
    return [i for i in range(program.num_tasks) if program.kind[i] == kind and word in program.tag[i]]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pieces", [1, 4])
def test_depth_arrives_rank_by_rank_in_both_engines(engine, pieces) -> None:
    here = context("before", 1024, 4096, 4096)
    program = build(STRATEGY, here, {"tile": TILE, "pieces": pieces, "comm_sms": 16})
    timeline = ENGINES[engine].run(program, contention=False)
    (flow,), (gemm,) = tasks(program, FLOW, "pull by 16"), tasks(program, BLOCKS, "fused gemm")
    # 256 tiles on 116 SMs are three waves of eight slices each; own slices need nothing.
    waves, slice_ps, chunk = math.ceil(256 / 116), int(program.unit_ps[gemm]), int(program.unit_ps[flow])
    assert (waves, int(program.units[gemm])) == (3, 3 * 8 * 116)
    start, flag = ps_from_s(here.prices.barrier_s), ps_from_s(here.prices.flag_s)
    gates = {
        (block * waves // pieces, rank): start + (block * 7 + rank) * chunk + flag
        for block in range(pieces)
        for rank in range(1, 8)
    }
    done, opened = 0, 0
    for wave in range(waves):
        for rank in range(8):
            opened = max(opened, *(at for key, at in gates.items() if key <= (wave, rank)), 0)
            done = max(done, opened) + slice_ps
    assert timeline.t_end[gemm] == timeline.end_ps == done
    assert timeline.t_start[gemm] == 0, "own slices wait for nobody"


@pytest.mark.parametrize("engine", ENGINES)
def test_tiles_are_stored_behind_the_columns_that_are_done(engine) -> None:
    here = context("after", 1024, 8192, 4096)
    program = build(STRATEGY, here, {"tile": TILE, "pieces": 1, "transport": "stores"})
    timeline = ENGINES[engine].run(program, contention=False)
    (flow,), (gemm,) = tasks(program, FLOW, "stores to owners"), tasks(program, BLOCKS, "fused gemm")
    wave_ps, chunk = int(program.unit_ps[gemm]), int(program.unit_ps[flow])
    sent = 0
    # Eight columns of tiles of eight rows belong to each rank.
    for rank in range(1, 8):
        sent = max(sent, math.ceil(rank * 64 / 132) * wave_ps, ps_from_s(here.prices.barrier_s)) + chunk
    assert timeline.t_end[flow] == sent
    assert timeline.end_ps == max(sent, math.ceil(512 / 132) * wave_ps) + ps_from_s(here.prices.barrier_s)


@pytest.mark.parametrize("relation", ["after", "before"])
def test_kernels_between_change_sides_at_their_own_price(relation) -> None:
    plain, rotated = context(relation), context(relation, rope=True)
    point = {"tile": TILE, "pieces": 1}
    kernel_s = rotated.prices.kernel(rotated.graph.operators[1]).duration_s
    times = [simulate(STRATEGY, here, point, contention=False).duration_s for here in (plain, rotated)]
    # The GEMM may start where the barrier would: at most a wait for its stream is added.
    assert kernel_s <= times[1] - times[0] + 1e-12 <= kernel_s + 2 * plain.prices.signal_wait_s
    program = build(STRATEGY, rotated, point)
    (rope,), (gemm,) = tasks(program, BLOCKS, "kernel"), tasks(program, BLOCKS, "fused gemm")
    timeline = compiled.run(program)
    first, second = (gemm, rope) if relation == "after" else (rope, gemm)
    assert timeline.t_end[first] <= timeline.t_start[second]


def test_exposed_time_is_told_by_the_group() -> None:
    points = {"after": ({"transport": "stores"}, {}), "before": ({"comm_sms": 8}, {})}
    for relation, point in ((relation, point) for relation, some in points.items() for point in some):
        program = build(STRATEGY, context(relation), {"tile": TILE, "pieces": 1, **point})
        flows = [i for i in range(program.num_tasks) if program.kind[i] == FLOW]
        assert flows and all(program.tag[i].endswith("[sp]") for i in flows)


def test_fused_beats_serial_where_both_sides_are_long() -> None:
    serial = load_strategy("serial")
    for relation in ("after", "before"):
        here = context(relation, 4096, 8192, 8192)
        point = {"tile": TILE, "pieces": 2}
        alone = simulate(serial, here, {}).duration_s
        longest = max(here.prices.operator_s(op) for op in here.graph.operators)
        assert longest < simulate(STRATEGY, here, point).duration_s < 0.85 * alone


@pytest.mark.parametrize(
    ("here", "cause", "why"),
    [
        (context(ranks=1), "little_to_hide", "nothing to communicate"),
        (context(cluster=H100.with_nodes(2), ranks=16), "none", "span nodes"),
        (context(cluster=load_cluster("rtx4090-pcie8")), "none", "no peer-to-peer access"),
        (context(m=128, n=512), "under_one_wave", "one wave"),
    ],
)
def test_refuses_with_reasons(here, cause, why) -> None:
    answer = STRATEGY.applies_to(here)
    assert not answer.applies and answer.cause == cause and why in "; ".join(answer.reasons)


def test_other_kernels_on_the_way_are_refused() -> None:
    here = context(rope=True)
    gemm, _, exchange = here.graph.operators
    norm = KernelOp(MemoryOp("rmsnorm", 1024, 6144), "attn.norm")
    answer = STRATEGY.applies_to(Context(OperatorGraph((gemm, norm, exchange), ((0, 1), (1, 2))), here.prices))
    assert not answer.applies and "attn.norm" in answer.reasons[0]


def test_parameters_are_checked() -> None:
    behind, front = context("after"), context("before")
    for here, wrong in (
        (behind, {"comm_sms": 8}),
        (front, {"transport": "stores"}),
        (front, {"comm_sms": 132}),
        (front, {"tile": (128, 128)}),
    ):
        with pytest.raises(StrategyError):
            build(STRATEGY, here, {"tile": TILE, "pieces": 1, **wrong})
    assert STRATEGY.settings(front, {"tile": TILE, "pieces": 2, "comm_sms": 8})["transport"] == "sms"
    assert STRATEGY.extra_memory_bytes(front, {"tile": TILE, "pieces": 2}) == 4 * 14
    codes = [f.code for f in STRATEGY.findings(behind, {"tile": TILE, "pieces": 1, "transport": "stores"})]
    assert codes == ["kernel_time_assumed", "transport_assumed"]


@settings(deadline=None, max_examples=25)
@given(
    relation=st.sampled_from(["after", "before"]),
    m=st.integers(64, 3000),
    n=st.integers(64, 4000),
    k=st.integers(64, 4000),
    ranks=st.sampled_from([2, 3, 8]),
    pieces=st.integers(1, 5),
    comm_sms=st.sampled_from([0, 4, 20]),
)
def test_any_shape_ends_and_never_below_kernel_or_bytes(relation, m, n, k, ranks, pieces, comm_sms) -> None:
    here = context(relation, m, n, k, ranks)
    point = {"tile": TILE, "pieces": pieces, "comm_sms": comm_sms if relation == "before" else 0}
    seconds = simulate(STRATEGY, here, point).duration_s
    gemm = next(here.graph.of_type(GemmOp))
    kernel = here.prices.kernel_gemm(gemm, "fused_exchange", TILE, slowdown=1.0)
    moved = next(here.graph.of_type(CollectiveOp)).size_bytes * (ranks - 1) / ranks / 200e9
    assert seconds >= max(kernel.duration_s * (1 - 1e-6), moved)
    # Without contention: slow copies leave the kernel more of the memory's rate.
    slower = Context(here.graph, here.prices.scaled("collective", 3.0))
    alone, longer = (simulate(STRATEGY, each, point, contention=False).duration_s for each in (here, slower))
    assert longer >= alone * (1 - 1e-9)
