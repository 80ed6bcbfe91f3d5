"""Orders of operators: closed forms, never worse than given, never under the bound, dependencies kept."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.prices import PriceBook
from overlapsim.errors import StrategyError
from overlapsim.hardware.loading import load_cluster
from overlapsim.strategy.order_bound import Load, order_bound_s
from overlapsim.strategy.ordering import Lines, arrange_by, best_order, lines_of, stream_of, time_of
from overlapsim.workload.operators import CollectiveOp, GemmOp, OperatorGraph

# Gradient, its reduction, the next gradient that waits for that, and the weight gradient that could run meanwhile.
HIDE = Lines((1.0, 1.0, 1.0, 1.0), (0, 1, 0, 0), ((), (0,), (1,), (0,)), ("compute", "ordered tp"))


def test_work_that_needs_nothing_goes_under_communication() -> None:
    assert time_of(HIDE, range(4)) == 4.0
    found = best_order(HIDE, 1)
    assert found.seconds == 3.0 == order_bound_s(HIDE)
    assert found.positions.index(3) < found.positions.index(2)


def test_the_given_order_stands_where_nothing_is_better() -> None:
    chain = Lines((1.0, 2.0, 3.0), (0, 1, 0), ((), (0,), (1,)), ("compute", "ordered tp"))
    assert best_order(chain, 8).positions == (0, 1, 2)
    assert best_order(chain, 8).seconds == order_bound_s(chain) == 6.0


@st.composite
def problems(draw, most: int = 12) -> Lines:
    count = draw(st.integers(1, most))
    lines = draw(st.integers(1, 3))
    seconds = tuple(draw(st.lists(st.floats(0.1, 10.0), min_size=count, max_size=count)))
    line = tuple(draw(st.integers(0, lines - 1)) for _ in range(count))
    before = tuple(tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)))) if i else () for i in range(count))
    return Lines(seconds, line, before, tuple(f"line {i}" for i in range(lines)))


@given(problems(), st.sampled_from((1, 4, 32)))
@settings(max_examples=200, deadline=None)
def test_between_the_bound_and_the_given_order(lines: Lines, beam: int) -> None:
    found = best_order(lines, beam)
    assert sorted(found.positions) == list(range(len(lines.seconds)))
    assert time_of(lines, found.positions) == pytest.approx(found.seconds)
    assert order_bound_s(lines) * (1 - 1e-9) <= found.seconds <= time_of(lines, range(len(lines.seconds))) * (1 + 1e-9)
    place = {position: number for number, position in enumerate(found.positions)}
    assert all(place[a] < place[b] for b, before in enumerate(lines.before) for a in before)


def test_the_bound_counts_what_collectives_cost_and_where_the_machine_must_wait() -> None:
    """Two thirds of a collective of 2 can be hidden; the piece of 2 loses a quarter of its speed for its time."""
    lines = Lines((1.0, 2.0, 1.0, 2.0), (0, 1, 0, 0), ((), (0,), (1,), (0,)), ("compute", "ordered tp"))
    assert order_bound_s(lines) == 4.0
    # Computation of 4, and 0.5 lost beside the collective.
    assert order_bound_s(lines, (Load(lines.seconds, (0.0, 0.5, 0.0, 0.0)),)) == 4.5
    # A chain 1 - 4 - 1 with pieces of 1 before it that only the chain's end needs: the machine stands for 3.
    waits = Lines((1.0, 4.0, 1.0, 1.0), (0, 1, 0, 0), ((), (0,), (1, 3), ()), ("compute", "ordered tp"))
    assert order_bound_s(waits) == 6.0
    # Behind two exchanges on different lines one after the other, all of both is waited for.
    serial = Lines((3.0, 3.0, 1.0, 4.0), (1, 2, 0, 0), ((), (0,), (1,), (2,)), ("compute", "ordered tp", "ordered ep"))
    assert order_bound_s(serial) == 11.0


@given(problems(10), st.floats(0.0, 0.4))
@settings(max_examples=100, deadline=None)
def test_losses_only_raise_the_bound_and_never_by_more_than_they_are(lines: Lines, share: float) -> None:
    lost = tuple(share * seconds if line else 0.0 for seconds, line in zip(lines.seconds, lines.line, strict=True))
    alone, with_losses = order_bound_s(lines), order_bound_s(lines, (Load(lines.seconds, lost),))
    assert alone <= with_losses <= alone + sum(lost) + 1e-9


def test_collectives_of_the_step_and_of_one_rank_stay() -> None:
    graph = OperatorGraph(
        (
            GemmOp(64, 64, 64, name="mlp.fc1", pass_="wgrad"),
            CollectiveOp("all_reduce", 1e6, 8, name="grad.mlp.fc1", pass_="wgrad"),
            CollectiveOp("all_reduce", 1e6, 8, name="mlp.fc1", pass_="dgrad", group="tp"),
            CollectiveOp("all_reduce", 1e6, 1, name="mlp.fc2", pass_="dgrad", group="ep"),
        ),
        ((0, 1),),
    )
    assert [stream_of(graph, i) for i in range(4)] == ["compute", "compute", "ordered tp", "compute"]
    arranged = arrange_by(graph, (2, 0, 1, 3), sms=4)
    assert [op.sms for op in arranged.of_type(CollectiveOp)] == [4, 0, 0]
    # Each collective its own, by its old position.
    arranged = arrange_by(graph, (2, 0, 1, 3), {2: 6, 1: 3})
    assert [op.sms for op in arranged.of_type(CollectiveOp)] == [6, 0, 0]


def test_too_large_a_graph_is_refused() -> None:
    graph = OperatorGraph(tuple(GemmOp(64, 64, 64) for _ in range(300)))
    with pytest.raises(StrategyError, match="300 operators"):
        lines_of(graph, PriceBook(load_cluster("a800-sxm8"), 8))
