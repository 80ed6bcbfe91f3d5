"""Exact wave-group partition: the best split of consecutive waves into groups, by dynamic programming."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlapsim.errors import StrategyError
from overlapsim.jit import compiled
from overlapsim.strategy.base import Partition

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """One partition of the waves.

    Attributes
    ----------
    cuts : rising wave numbers after which a group ends; the last is the number of waves
    value_s : when the last group is communicated
    """

    cuts: tuple[int, ...]
    value_s: float

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.cuts)


def solve(partition: Partition, k_best: int = 1) -> tuple[Split, ...]:
    """Find the `k_best` best splits, best first; the first has the fewest groups among the optimal ones.

    ``C[w] = min over v < w of max(A[w], C[v]) + tau[v, w]`` only grows with
    C[v], so keeping the k smallest values of every state finds the k best of
    all 2^(T-1) partitions.  One group is the kernel alone and then the
    collective: ``whole_s + tau[0, T]``.

    Parameters
    ----------
    partition : Partition
        T waves; O(T^2) memory, O(T^2 k) time (78 waves take well under 1 ms warm).
    k_best : int
        Distinct partitions wanted, at least 1; fewer are returned when fewer exist.

    Returns
    -------
    tuple of Split
        Rising in value.  Value ties after the first keep the order in which the recurrence meets them.

    Raises
    ------
    StrategyError
        If the arrays do not fit together or `k_best` is below 1.

    Examples
    --------
    >>> two = Partition(np.array([1.0, 2.0]), 2.0, np.array([[0.5, 1.0], [np.inf, 0.5]]), lambda cuts: {})
    >>> solve(two)
    (Split(cuts=(1, 2), value_s=2.5),)
    """
    waves = np.ascontiguousarray(partition.wave_end_s, np.float64)
    tau = np.ascontiguousarray(partition.tau_s, np.float64)
    count = len(waves)
    if count < 1 or tau.shape != (count, count):
        raise StrategyError(f"a partition has {count} waves and tau of shape {tau.shape}; expected (T, T), T >= 1")
    if k_best < 1:
        raise StrategyError(f"k_best is {k_best}; expected at least 1")
    upper = tau[np.triu_indices(count)]
    if not (np.isfinite(waves).all() and np.all(np.diff(waves, prepend=0.0) >= 0) and np.all(upper >= 0)):
        raise StrategyError(
            "a partition has times that are not numbers, fall or are negative; check its wave_end_s, tau_s"
        )
    k_best = min(k_best, 2 ** min(count - 1, 30))
    whole = float(partition.whole_s + tau[0, count - 1])
    # The one-group split stands outside the recurrence: it keeps all SMs.
    values, back, rank, found = _k_best(waves, tau, k_best)
    splits = [Split(_walk(back, rank, count, r), float(values[count, r])) for r in range(int(found[count]))]
    splits.append(Split((count,), whole))
    splits.sort(key=lambda split: split.value_s)
    best = splits[0].value_s
    first = Split((count,), whole) if whole == best else Split(_fewest(waves, tau, best), best)
    others = [split for split in splits if split.cuts != first.cuts]
    return (first, *others)[:k_best]


def best_by_groups(partition: Partition, max_groups: int) -> tuple[Split, ...]:
    """Find the best split with exactly k groups, for k = 1 .. `max_groups` (at most the number of waves).

    Returns
    -------
    tuple of Split
        Entry k - 1 has k groups: latency against number of groups, and
        candidates that differ more than the k best of :func:`solve`.

    Raises
    ------
    StrategyError
        If `max_groups` is below 1.
    """
    if max_groups < 1:
        raise StrategyError(f"max_groups is {max_groups}; expected at least 1")
    waves, tau = partition.wave_end_s, partition.tau_s
    count = len(waves)
    values, back, _ = _by_groups(waves, tau, min(max_groups, count), -np.inf)
    splits = [Split((count,), float(partition.whole_s + tau[0, count - 1]))]
    splits += [Split(_cuts(back, count, k), float(values[k])) for k in range(2, min(max_groups, count) + 1)]
    return tuple(splits)


def _fewest(waves: Float, tau: Float, best: float) -> tuple[int, ...]:
    _, back, groups = _by_groups(waves, tau, len(waves), best)
    return _cuts(back, len(waves), groups)


def _cuts(back: Int, count: int, groups: int) -> tuple[int, ...]:
    cuts = [count]
    for k in range(groups, 1, -1):
        cuts.append(int(back[k, cuts[-1]]))
    return tuple(reversed(cuts))


def _walk(back: Int, rank: Int, w: int, r: int) -> tuple[int, ...]:
    cuts = []
    while w > 0:
        cuts.append(w)
        w, r = int(back[w, r]), int(rank[w, r])
    return tuple(reversed(cuts))


@compiled
def _k_best(waves: Float, tau: Float, k_best: int) -> tuple[Float, Int, Int, Int]:
    """Values, predecessors and their ranks of the k best prefixes of every length, without the one-group split."""
    count = len(waves)
    values = np.full((count + 1, k_best), np.inf)
    back = np.zeros((count + 1, k_best), np.int64)
    rank = np.zeros((count + 1, k_best), np.int64)
    found = np.zeros(count + 1, np.int64)
    values[0, 0] = 0.0
    found[0] = 1
    for w in range(1, count + 1):
        done = waves[w - 1]
        have = 0
        # Late predecessors first: with equal values the finest last group is met first.
        for v in range(w - 1, -1, -1):
            if v == 0 and w == count:
                break
            step = tau[v, w - 1]
            for r in range(found[v]):
                value = max(done, values[v, r]) + step
                if have == k_best and value >= values[w, have - 1]:
                    break
                place = have if have < k_best else k_best - 1
                while place > 0 and values[w, place - 1] > value:
                    values[w, place] = values[w, place - 1]
                    back[w, place] = back[w, place - 1]
                    rank[w, place] = rank[w, place - 1]
                    place -= 1
                values[w, place] = value
                back[w, place] = v
                rank[w, place] = r
                if have < k_best:
                    have += 1
        found[w] = have
    return values, back, rank, found


@compiled
def _by_groups(waves: Float, tau: Float, most: int, stop_at: float) -> tuple[Float, Int, int]:
    """Best value for exactly k = 2 .. `most` groups and predecessors, up to the first k that attains `stop_at`."""
    count = len(waves)
    back = np.zeros((most + 1, count + 1), np.int64)
    values = np.full(most + 1, np.inf)
    before = np.full(count + 1, np.inf)
    for w in range(1, count):
        before[w] = waves[w - 1] + tau[0, w - 1]
    for k in range(2, most + 1):
        now = np.full(count + 1, np.inf)
        for w in range(k, count + 1):
            done = waves[w - 1]
            for v in range(k - 1, w):
                value = max(done, before[v]) + tau[v, w - 1]
                if value < now[w]:
                    now[w] = value
                    back[k, w] = v
        values[k] = now[count]
        if now[count] <= stop_at:
            return values, back, k
        before = now
    return values, back, most
