"""Dispatchers as operators: bytes counted from tensor shapes, what low latency is made of, rows of uneven routing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapsim.errors import WorkloadError
from overlapsim.workload.build import GraphBuilder
from overlapsim.workload.build_dispatch import FLIGHT, FP8_BYTES
from overlapsim.workload.dispatchers import DISPATCHERS, DispatchOptions, parse_dispatch, route_of
from overlapsim.workload.layout import Layout
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.model import MoE
from overlapsim.workload.operators import COMPUTE, CollectiveOp, GroupedGemmOp, KernelOp, OperatorGraph
from overlapsim.workload.presets import load_preset
from overlapsim.workload.recipe import Recipe, with_dispatch
from overlapsim.workload.routing import UNIFORM, Routing

MODEL = load_preset("deepseek-v3")
LAYER = MODEL.layers[-1]
MOE = LAYER.mlp
assert isinstance(MOE, MoE)
TOKENS, RANKS = 1024, 16
COPIES_BYTES = TOKENS * MOE.top_k * MODEL.hidden * 2


def graph(dispatch: str, which="forward", routing: Routing = UNIFORM, **layout) -> OperatorGraph:
    at = Layout(**{"ep": RANKS, "dp": RANKS, **layout})
    return GraphBuilder(MODEL, at, with_dispatch(Recipe(), dispatch), 1, TOKENS, routing=routing).layer(LAYER, which)


def moved(found: OperatorGraph, name: str = "moe.") -> list[CollectiveOp]:
    return [op for op in found.of_type(CollectiveOp) if op.name.startswith(name)]


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("name", DISPATCHERS)
def test_bytes_are_those_of_the_shapes(name: str, which: str) -> None:
    """Facts of MegaScale-MoE 1.3: an exchange carries top-k rows of each token, a gather all tokens of all ranks."""
    exchanged = [op for op in moved(graph(name, which)) if op.kind == "all_to_all"]
    if name == "all_gather":
        kinds = {op.kind for op in moved(graph(name, which))}
        assert not exchanged and kinds == {"all_gather", "reduce_scatter"}
        assert {op.size_bytes for op in moved(graph(name, which))} == {TOKENS * RANKS * MODEL.hidden * 2}
        return
    assert [op.name for op in exchanged] == (
        ["moe.dispatch", "moe.combine"] if which == "forward" else ["moe.combine", "moe.dispatch"]
    )
    assert {op.size_bytes for op in exchanged} == {COPIES_BYTES}
    assert all((op.route is None) == (name == "all_to_all") for op in exchanged)


def test_narrow_dispatch_goes_out_in_fp8_and_comes_home_in_bf16() -> None:
    for which in ("forward", "backward"):
        found = graph("deepep:dtype=fp8", which)
        sizes = {(op.name, op.pass_): op.size_bytes for op in moved(found)}
        if which == "backward":
            assert set(sizes.values()) == {COPIES_BYTES}
            continue
        assert sizes["moe.dispatch", "fwd"] == COPIES_BYTES * FP8_BYTES / 2
        assert sizes["moe.combine", "fwd"] == COPIES_BYTES
        (cast,) = (op for op in found.of_type(KernelOp) if op.name == "moe.dispatch")
        assert isinstance(cast.work, MemoryOp) and (cast.work.kind, cast.work.rows) == ("quantize_fp8", TOKENS)


def test_low_latency_is_issue_flight_and_receive() -> None:
    """The flight is on a stream of its own and holds no SM, so that what is launched behind the issue runs under it."""
    found = graph("deepep_low_latency")
    ours = [(n, op) for n, op in enumerate(found.operators) if op.name == "moe.dispatch"]
    assert [type(op) for _, op in ours] == [KernelOp, CollectiveOp, KernelOp]
    assert [found.stream_of(n) for n, _ in ours] == [COMPUTE, FLIGHT, COMPUTE]
    (issue, _), (flight, op), (receive, _) = ours
    assert issue in found.producers(flight) and flight in found.producers(receive)
    assert op.route is not None and op.route.sms == 0


def test_hybrid_gathers_the_routing_map_once() -> None:
    gathers = [op for op in moved(graph("hybrid_ep")) if op.kind == "all_gather"]
    assert [op.size_bytes for op in gathers] == [TOKENS * RANKS * MOE.num_experts]
    assert not [op for op in moved(graph("hybrid_ep", "backward")) if op.kind == "all_gather"]


def test_limits_and_sms_reach_the_route() -> None:
    _, options = parse_dispatch("deepep:node_limit=2,sms=20")
    assert (route_of("deepep", options, MOE).node_limit, route_of("deepep", options, MOE).sms) == (2, 20)
    # DeepSeek's router takes experts of at most four groups.
    assert route_of("deepep", DispatchOptions(), MOE).node_limit == MOE.top_groups == 4
    assert route_of("deepep", DispatchOptions(), replace(MOE, top_groups=8)).node_limit == 0
    assert route_of("all_gather", options, MOE) is None


@pytest.mark.parametrize(
    ("text", "part"),
    [("boat", "boat"), ("deepep:sms", "key=value"), ("deepep:sms=x", "sms"), ("deepep:dtype=int4", "int4"),
     ("deepep:sms=1,sms=2", "once"), ("deepep:balanced=maybe", "balanced")],
)  # fmt: skip
def test_refusals(text: str, part: str) -> None:
    with pytest.raises(WorkloadError, match=part):
        parse_dispatch(text)


def test_uneven_rows_go_to_tiles_bytes_and_ranks() -> None:
    """Each expert has its own rows; the exchange is sized by the rank with most, and says what each rank gets."""
    found = graph("all_to_all", routing=Routing("zipf", 0.8))
    grouped = [op.work for op in found.of_type(KernelOp) if isinstance(op.work, GroupedGemmOp)]
    rows = grouped[0].rows
    assert len(rows) == MOE.num_experts // RANKS and list(rows) == sorted(rows, reverse=True) and rows[0] > rows[-1]
    for op in moved(found):
        assert len(op.rank_rows) == RANKS and max(op.rank_rows) == op.rank_rows[0] == sum(rows)
        assert op.size_bytes == sum(rows) * MODEL.hidden * 2 > COPIES_BYTES
        assert abs(sum(op.rank_rows) - TOKENS * RANKS * MOE.top_k) <= MOE.num_experts
    even = graph("all_to_all")
    assert all(not op.rank_rows for op in moved(even))
    # A gather moves all tokens whatever their experts.
    assert {op.size_bytes for op in moved(graph("all_gather", routing=Routing("zipf", 0.8)))} == {
        op.size_bytes for op in moved(graph("all_gather"))
    }


def test_no_exchange_on_one_rank() -> None:
    for name in DISPATCHERS:
        assert not moved(graph(name, ep=1, dp=1))
