"""Who sends which shard to whom in each step of a ring: plain numbers, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from overlapsim.errors import PlanError

FORMS: Final = ("unidirectional", "bidirectional", "aggregate")
Move = tuple[int, int]
"""Peer and shard."""


@dataclass(frozen=True)
class RingStep:
    """One step on one rank.

    Attributes
    ----------
    shards : multiplied together in it, in the order in which their rows lie
    received : (peer, shard) that arrive for it: rows of A before the GEMM, or partial sums to add after it
    sent : (peer, shard) that leave meanwhile
    """

    shards: tuple[int, ...]
    received: tuple[Move, ...] = ()
    sent: tuple[Move, ...] = ()


def gather_steps(rank: int, ranks: int, form: str) -> tuple[RingStep, ...]:
    """Steps of an all_gather ring: what arrives in a step is multiplied in it and sent on in the next.

    Raises
    ------
    PlanError
        If the form is unknown, or pairs are asked of an odd number of ranks.

    Examples
    --------
    >>> [step.shards for step in gather_steps(0, 4, "unidirectional")]
    [(0,), (3,), (2,), (1,)]
    >>> [step.shards for step in gather_steps(0, 4, "bidirectional")]
    [(0,), (3, 1), (2,)]
    """
    _check(ranks, form, aggregate=True)
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    if form == "aggregate":
        pair, buddy = rank // 2, rank ^ 1
        steps = [RingStep((2 * pair, 2 * pair + 1), ((buddy, buddy),), ((buddy, rank),))]
        for step in range(1, ranks // 2):
            mine, theirs = ((pair - step + back) % (ranks // 2) for back in (0, 1))
            received = tuple(((rank - 2) % ranks, 2 * mine + half) for half in (0, 1))
            sent = tuple(((rank + 2) % ranks, 2 * theirs + half) for half in (0, 1))
            steps.append(RingStep((2 * mine, 2 * mine + 1), received, sent))
        return tuple(steps)
    steps = [RingStep((rank,))]
    both = form == "bidirectional"
    for step in range(1, (ranks // 2 if both else ranks - 1) + 1):
        arriving = [(before, (rank - step) % ranks)]
        leaving = [(after, (rank - step + 1) % ranks)]
        # With an even number of ranks the farthest shard is one, and comes from one side.
        if both and 2 * step != ranks:
            arriving.append((after, (rank + step) % ranks))
            leaving.append((before, (rank + step - 1) % ranks))
        steps.append(RingStep(tuple(shard for _, shard in arriving), tuple(arriving), tuple(leaving)))
    return tuple(steps)


def scatter_steps(rank: int, ranks: int, form: str) -> tuple[RingStep, ...]:
    """Steps of a reduce_scatter ring: a partial sum arrives, gets this rank's rows added and is sent on in the next.

    Raises
    ------
    PlanError
        If the form is unknown or moves pairs.

    Examples
    --------
    >>> [step.shards for step in scatter_steps(0, 4, "unidirectional")]
    [(3,), (2,), (1,), (0,)]
    >>> [step.shards for step in scatter_steps(0, 4, "bidirectional")]
    [(2,), (1, 3), (0,)]
    """
    _check(ranks, form, aggregate=False)
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    if form == "unidirectional":
        order = [(rank - 1 - step) % ranks for step in range(ranks)]
        return tuple(
            RingStep((shard,), ((before, shard),) if step else (), ((after, order[step - 1]),) if step else ())
            for step, shard in enumerate(order)
        )
    # By distance to the rank that a partial sum is for: upwards from the left side, downwards from the right.
    steps, last = list[RingStep](), tuple[Move, ...]()
    for distance in range(ranks // 2, -1, -1):
        up, down = (rank + distance) % ranks, (rank - distance) % ranks
        shards = (up,) if distance in (0, ranks / 2) else (up, down)
        received = []
        if distance < ranks // 2:
            received.append((before, up))
        if distance < (ranks - 1) // 2:
            received.append((after, down))
        steps.append(RingStep(shards, tuple(received), last))
        last = ((after, up),) if len(shards) == 1 else ((after, up), (before, down))
    return tuple(steps)


def pull_steps(rank: int, ranks: int) -> tuple[RingStep, ...]:
    """Steps of a gather in which every shard comes straight from the rank that owns it, the nearest first.

    Examples
    --------
    >>> [(step.shards, step.received) for step in pull_steps(1, 3)]
    [((1,), ()), ((2,), ((2, 2),)), ((0,), ((0, 0),))]
    """
    steps = [RingStep((rank,))]
    for step in range(1, ranks):
        source, taker = (rank + step) % ranks, (rank - step) % ranks
        steps.append(RingStep((source,), ((source, source),), ((taker, rank),)))
    return tuple(steps)


def _check(ranks: int, form: str, *, aggregate: bool) -> None:
    if form not in FORMS or (form == "aggregate" and not aggregate):
        raise PlanError(f"form of a ring is {form!r}; expected {', '.join(FORMS[: 2 + aggregate])}")
    if form == "aggregate" and ranks % 2:
        raise PlanError(f"an aggregate ring moves pairs of shards; {ranks} ranks have none")
