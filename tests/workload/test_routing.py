"""Routing as a distribution: rows are conserved, skew only grows, capacity and balance do what they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapsim.errors import UsageError
from overlapsim.workload.routing import UNIFORM, Routing, read_counts

shapes = st.tuples(st.sampled_from((8, 16, 64)), st.integers(1, 8), st.integers(64, 4096), st.sampled_from((1, 2, 8)))
routings = st.one_of(
    st.floats(0, 20).map(lambda exponent: Routing("zipf", exponent)),
    st.just(UNIFORM),
)


@given(routings, shapes)
def test_every_copy_goes_somewhere_and_no_expert_gets_a_token_twice(routing: Routing, shape: tuple) -> None:
    experts, top_k, tokens, ranks = shape
    rows = np.array(routing.rank_rows(experts, top_k, tokens, ranks))
    assert rows.shape == (ranks, experts // ranks)
    assert abs(rows.sum() - tokens * top_k) <= experts  # rounded one by one
    assert rows.max() <= tokens


@given(st.floats(0, 10), st.floats(0.01, 5), shapes)
def test_the_fullest_rank_only_gets_fuller_with_the_exponent(exponent: float, more: float, shape: tuple) -> None:
    experts, top_k, tokens, ranks = shape
    less, skewed = (
        max(map(sum, Routing("zipf", e).rank_rows(experts, top_k, tokens, ranks))) for e in (exponent, exponent + more)
    )
    assert skewed >= less - experts


@given(routings, shapes, st.floats(0.5, 4))
def test_capacity(routing: Routing, shape: tuple, factor: float) -> None:
    experts, top_k, tokens, ranks = shape
    even = tokens * top_k
    free, expert, device = (
        np.array(routing.rank_rows(experts, top_k, tokens, ranks, capacity_factor=f, capacity_per=per))
        for f, per in ((None, "expert"), (factor, "expert"), (factor, "device"))
    )
    assert (expert <= free).all() and expert.max() <= factor * even / experts + 1
    assert (device <= free + 1).all() and device.sum(axis=1).max() <= factor * even / ranks + experts
    # A group's capacity drops nothing of a group that is not over it, however uneven its experts are.
    fitting = free.sum(axis=1) <= factor * even / ranks
    assert (np.abs(device - free)[fitting] <= 1).all()
    assert device.sum() >= expert.sum() - experts


@given(st.floats(0, 8), shapes)
def test_balance_over_devices_makes_ranks_even_and_not_experts(exponent: float, shape: tuple) -> None:
    experts, top_k, tokens, ranks = shape
    rows = np.array(Routing("zipf", exponent).rank_rows(experts, top_k, tokens, ranks, balanced=True))
    if ranks >= top_k:
        assert np.ptp(rows.sum(axis=1)) <= experts
    assert rows.max() <= tokens


def test_one_expert_gets_everything() -> None:
    counts = Routing("counts", counts=(0.0, 0.0, 1.0, 0.0))
    assert counts.rank_rows(4, 1, 1000, 2) == ((0, 0), (1000, 0))
    # A token's second copy cannot go to the same expert.
    assert counts.rank_rows(4, 2, 999, 2) == ((333, 333), (999, 333))
    assert Routing("zipf", 64.0).rank_rows(4, 1, 1000, 4) == ((1000,), (0,), (0,), (0,))
    assert counts.rank_rows(4, 1, 1000, 2, capacity_factor=1.0) == ((0, 0), (250, 0))
    assert counts.rank_rows(4, 1, 1000, 2, capacity_factor=1.0, capacity_per="device") == ((0, 0), (500, 0))


@given(
    st.one_of(
        routings,
        st.lists(st.floats(0, 1e6), min_size=1, max_size=9)
        .map(tuple)
        .filter(sum)
        .map(lambda counts: Routing("counts", counts=(*(round(count, 3) for count in counts), 1.0))),
    )
)
def test_text_is_read_back(routing: Routing) -> None:
    again = Routing.parse(str(routing))
    assert again.kind == routing.kind or (again.even and routing.even)
    assert again.exponent == pytest.approx(routing.exponent) and again.counts == pytest.approx(routing.counts)


def test_files_of_counts() -> None:
    assert read_counts("[3, 1.5]").counts == (3.0, 1.5)
    assert read_counts("expert,tokens\n0,3\n1,1\n").counts == read_counts("3\n1\n").counts == (3.0, 1.0)
    for text in ("", "{}", "a,b\nc,d", "[[1]]"):
        with pytest.raises(UsageError, match="recorded counts"):
            read_counts(text)


@pytest.mark.parametrize(
    "text", ["zipf:-1", "zipf:x", "zipf", "even", "counts:", "counts:0:0", "counts:1:-1", "zipf:nan"]
)
def test_refusals(text: str) -> None:
    with pytest.raises(UsageError):
        Routing.parse(text)


def test_counts_of_another_model() -> None:
    with pytest.raises(UsageError, match="2 recorded counts and 4 experts"):
        Routing("counts", counts=(1.0, 2.0)).shares(4, 1)


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff5\n1\n",  # a byte order mark is no header
        "tokens\r\n5\r\n1\r\n",
        "5e0\n1\n",
        '"expert","tokens"\n"1","1"\n"0","5"\n',  # experts are numbered: any order
        "\ufeff[5, 1]",
    ],
)
def test_recorded_counts_as_tools_write_them(text: str) -> None:
    assert read_counts(text).counts == (5.0, 1.0)


@pytest.mark.parametrize(
    "text",
    ["", "tokens\n", "-5\n1\n1\n", "expert,tokens\n0,1\n0,2\n", "expert,tokens\n1,1\n2,2\n", "[true, 1]", "[" * 100_000,
     "[1" + "0" * 5000 + "]", '{"a": 1}', "[1, Infinity]", "0\n0\n", "1\nnan\n", "0;1\n1;2\n"],
    ids=range(13),
)  # fmt: skip
def test_files_without_counts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="counts"):
        read_counts(text)
