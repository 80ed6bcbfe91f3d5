"""Third stage: what the library says of cases before they are run."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

from overlapsim.validate.cases import Case
from overlapsim.validate.loop import sizes
from overlapsim.validate.loop.host_waves import HOST_WAVE_GROUP
from overlapsim.validate.loop.profile import Machine, tiles_s
from overlapsim.validate.plans import RunSpec

from overlapsim.cost.prices import PriceBook
from overlapsim.planner.operator import FAMILIES, simulate
from overlapsim.strategy.base import Context, Strategy
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.operators import CollectiveKind, GemmOp, gemm_and_collective

_ENDS: Final[tuple[Literal["low", "high"], ...]] = ("low", "high")


def predict_cases(machine: Machine, ranks: int) -> list[Case]:
    """Every headline case with its prediction and central 90 %; nothing of them has been measured."""
    cases = []
    for name, spec in sizes.headline_specs(ranks):
        assert sizes.is_held_out(spec), f"{name} was measured as a part"
        cases.append(Case(name, spec, *predicted(machine, spec)))
    return cases


def predicted(machine: Machine, spec: RunSpec) -> tuple[float, float, float]:
    """Time of one case by `planner.operator.simulate` with its own parameters, and both ends of its range.

    Ranges as the planner makes them: one cost family at a time at its 5 % and 95 % value, deviations in quadrature.
    """
    context, strategy = _context(machine, spec), _strategy(spec)
    value = simulate(strategy, context, spec.parameters).duration_s
    low = high = 0.0
    for family in FAMILIES:
        for end in _ENDS:
            moved = replace(context, prices=context.prices.at(family, end))
            shift = simulate(strategy, moved, spec.parameters).duration_s - value
            low, high = low + min(0.0, shift) ** 2, high + max(0.0, shift) ** 2
    return value, max(0.0, value - low**0.5), value + high**0.5


def _strategy(spec: RunSpec) -> Strategy:
    return HOST_WAVE_GROUP if spec.strategy == HOST_WAVE_GROUP.name else load_strategy(spec.strategy)


def _context(machine: Machine, spec: RunSpec) -> Context:
    gemm = GemmOp(spec.m, spec.n, spec.k, spec.dtype, spec.accumulate)
    kind: CollectiveKind = spec.collective  # type: ignore[assignment]
    cluster = machine.cluster
    bare = PriceBook(cluster, spec.ranks)
    # The kernel by tiles is priced from its tiles, as GEMMs that the calibration knows, not from the case.
    kernel_s = machine.tiles_ratio * tiles_s(bare, spec.m, spec.n, spec.k, spec.dtype)
    prices = PriceBook(
        cluster,
        spec.ranks,
        gemm=gemm,
        kind=kind,
        kernel_time_s={HOST_WAVE_GROUP.name: kernel_s},
        tile=sizes.TILE,
        overlap_constants=machine.overlap(spec.collective),
    )
    return Context(gemm_and_collective(gemm, kind, spec.ranks), prices)
