"""When within a pass gradients are complete and parameters are needed: by the time of what comes before in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from overlapsim.workload.stage_weights import LocalParameters

Kind = Literal["dense", "expert"]


@dataclass(frozen=True)
class UnitCost:
    """A unit of parameters (a layer, the embedding, the logits) in one pass of one stage.

    Attributes
    ----------
    stage : where it is
    local : its parameters on one rank
    seconds : of the pass
    """

    stage: int
    local: LocalParameters
    seconds: float


@dataclass(frozen=True)
class Place:
    """A place within a pass of a stage: the share of the pass that is done, in [0, 1]."""

    stage: int
    share: float


def place_of(units: Sequence[UnitCost], kind: Kind, share: float, *, end: bool) -> Place:
    """Where a share of a device's parameters lies in a pass.

    Parameters
    ----------
    units : of all stages of a device, in the order in which the pass meets them
    kind : which parameters are counted
    share : of them, in (0, 1] for ends and [0, 1) for begins
    end : the end of the unit in which the share is reached (gradients are complete); else the begin of the unit in
        which the next parameter lies (it is needed)

    Examples
    --------
    >>> units = [UnitCost(0, LocalParameters(dense=n), s) for n, s in ((10, 3.0), (30, 1.0))]
    >>> place_of(units, "dense", 0.25, end=True).share, place_of(units, "dense", 0.25, end=False).share
    (0.75, 0.75)
    """
    total = sum(_count(unit, kind) for unit in units)
    wanted, before = share * total, 0
    chosen = None
    for number, unit in enumerate(units):
        count = _count(unit, kind)
        if count:
            chosen = number
            # A share meant as whole units is not in the next one for its rounding.
            if before + count >= wanted * (1 - 1e-9) if end else before + count > wanted * (1 + 1e-9):
                break
        before += count
    assert chosen is not None, "a device without parameters has no buckets of them"
    stage = units[chosen].stage
    own = [unit for unit in units if unit.stage == stage]
    done = sum(unit.seconds for unit in _until(units, chosen, stage, end))
    return Place(stage, min(1.0, done / (sum(unit.seconds for unit in own) or 1.0)))


def _count(unit: UnitCost, kind: Kind) -> int:
    return unit.local.dense if kind == "dense" else unit.local.expert


def _until(units: Sequence[UnitCost], number: int, stage: int, end: bool) -> Iterator[UnitCost]:
    return (unit for unit in units[: number + end] if unit.stage == stage)
