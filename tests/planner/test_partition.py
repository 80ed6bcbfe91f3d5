"""The partition solver against published numbers, brute force over all partitions, and its own special cases."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.errors import StrategyError
from overlapsim.planner.partition import Split, best_by_groups, solve
from overlapsim.strategy.base import Partition
from tests.planner.published_prices import tau_s

S, C = 108, 2
# M: (D ms, waves of the coarse published unit, coarse best ms, exact ms, fewest groups); N 8192, K 4096, 256x128.
GOLDEN = {8192: (2.3613457679748535, 2, 2.6033, 2.5491, 7), 32768: (8.68088, 8, 9.2432, 8.9673, 11)}


def published(m: int, unit: int = 1) -> Partition:
    """Return the artifact's problem with groups of whole units of `unit` waves."""
    tiles = (m // 256) * (8192 // 128)
    wave = GOLDEN[m][0] / math.ceil(tiles / S)
    waves = math.ceil(tiles / (S - C))
    ends = np.minimum(np.arange(0, waves + unit, unit), waves)
    done = np.minimum(ends * (S - C), tiles)
    first, last = np.triu_indices(len(ends) - 1)
    tau = np.full((len(ends) - 1,) * 2, np.inf)
    tau[first, last] = tau_s((done[last + 1] - done[first]) * (256 * 128.0)) * 1e3
    return Partition(wave * ends[1:], GOLDEN[m][0], tau, lambda cuts: {})


@pytest.mark.parametrize("m", GOLDEN)
def test_exact_optimum_of_the_published_problem(m: int) -> None:
    best = solve(published(m))[0]
    assert best.value_s == pytest.approx(GOLDEN[m][3], abs=1e-4)
    assert best.num_groups == GOLDEN[m][4]


@pytest.mark.parametrize("m", GOLDEN)
def test_coarse_published_search_gives_the_published_value(m: int) -> None:
    assert solve(published(m, unit=GOLDEN[m][1]))[0].value_s == pytest.approx(GOLDEN[m][2], abs=1e-4)


def all_splits(p: Partition) -> list[Split]:
    count = len(p.wave_end_s)
    result = []
    for cut in itertools.product((False, True), repeat=count - 1):
        cuts = (*(w for w in range(1, count) if cut[w - 1]), count)
        if len(cuts) == 1:
            result.append(Split(cuts, float(p.whole_s + p.tau_s[0, count - 1])))
            continue
        done = 0.0
        for v, w in itertools.pairwise((0, *cuts)):
            done = max(p.wave_end_s[w - 1], done) + p.tau_s[v, w - 1]
        result.append(Split(cuts, float(done)))
    return sorted(result, key=lambda split: split.value_s)


@st.composite
def partitions(draw: st.DrawFn, most: int) -> Partition:
    count = draw(st.integers(1, most))
    # Few distinct values make ties common; an irregular tau has no structure that a solver could lean on.
    number = st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.0]) if draw(st.booleans()) else st.floats(0.01, 10.0)
    per_wave = np.array(draw(st.lists(number, min_size=count, max_size=count)))
    fixed = draw(st.sampled_from([0.0, 0.125, 1.0]))
    tau = np.full((count, count), np.inf)
    for v in range(count):
        for w in range(v, count):
            tau[v, w] = fixed + draw(number)
    ends = np.cumsum(per_wave)
    return Partition(ends, float(ends[-1]) * draw(st.sampled_from([0.5, 0.9, 1.0])), tau, lambda cuts: {})


@settings(deadline=None, max_examples=150)
@given(partitions(most=9), st.integers(1, 12))
def test_solver_equals_brute_force(problem: Partition, k_best: int) -> None:
    check_against_brute_force(problem, k_best)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(partitions(most=14), st.integers(1, 40))
def test_solver_equals_brute_force_up_to_fourteen_waves(problem: Partition, k_best: int) -> None:
    check_against_brute_force(problem, k_best)


def check_against_brute_force(problem: Partition, k_best: int) -> None:
    every = all_splits(problem)
    found = solve(problem, k_best)
    assert [s.value_s for s in found] == [s.value_s for s in every[:k_best]]
    assert len({s.cuts for s in found}) == len(found)
    by_cuts = {s.cuts: s.value_s for s in every}
    assert all(by_cuts[s.cuts] == s.value_s for s in found)
    fewest = min(s.num_groups for s in every if s.value_s == every[0].value_s)
    assert found[0].num_groups == fewest
    for groups, split in enumerate(best_by_groups(problem, len(problem.wave_end_s)), start=1):
        assert split.num_groups == groups
        assert split.value_s == min(s.value_s for s in every if s.num_groups == groups)
        assert by_cuts[split.cuts] == split.value_s


def test_one_wave_is_one_group() -> None:
    assert solve(Partition(np.array([2.0]), 1.5, np.array([[0.5]]), lambda cuts: {}), 3) == (Split((1,), 2.0),)


def test_one_group_keeps_all_sms() -> None:
    tau = np.array([[1.0, 1.0], [np.inf, 1.0]])
    best = solve(Partition(np.array([2.0, 4.0]), 3.0, tau, lambda cuts: {}))[0]
    assert best == Split((2,), 4.0)


@pytest.mark.parametrize(
    ("waves", "tau", "k", "message"),
    [
        ([], np.empty((0, 0)), 1, "0 waves"),
        ([1.0], np.ones((2, 2)), 1, r"tau of shape \(2, 2\)"),
        ([1.0], np.ones((1, 1)), 0, "k_best is 0"),
    ],
)
def test_refuses(waves: list[float], tau: np.ndarray, k: int, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        solve(Partition(np.array(waves), 1.0, tau, lambda cuts: {}), k)


@pytest.mark.benchmark(group="partition")
def test_seventy_eight_waves(benchmark) -> None:
    problem = published(32768)
    assert len(problem.wave_end_s) == 78
    solve(problem)
    benchmark(solve, problem)
