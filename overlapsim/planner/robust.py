"""Plans that stay fast when something is not as it should be: the high end of the range under a perturbation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from overlapsim.errors import PlanError, StrategyError
from overlapsim.plan import Finding
from overlapsim.planner.found import Found
from overlapsim.planner.search import PlanRequest
from overlapsim.planner.space import DEGREES
from overlapsim.step.inputs import StepInputs
from overlapsim.step.perturb import Perturbation
from overlapsim.step.simulate import StepResult, simulate_step

ROBUST_MOST: Final = 64
"""Plans that are perturbed at most."""
ROBUST: Final = Perturbation.parse("slow=0.9,nic=0.8,imbalance=1.2")
"""Perturbed where nothing is said: one GPU at 0.9 of its speed, one node's NICs at 0.8, the fullest expert rank a fifth
over the even share. A convention, not a measurement."""


Say = Callable[[str], None]


def degrees_of(entry: Found) -> tuple[object, ...]:
    """What tells layouts apart."""
    inputs = entry.result.inputs
    degrees = (getattr(inputs.layout, name) for name in DEGREES if name != "vpp")
    return (inputs.cluster.num_nodes, inputs.recipe.fp8, *degrees)


def by_high_end(
    found: Sequence[Found], request: PlanRequest, perturbation: Perturbation, models: dict[object, object], say: Say
) -> tuple[list[Found], dict[int, StepResult], list[Finding]]:
    """Plans by the high end of their perturbed range, of those that are fastest undisturbed.

    A perturbation only slows: a plan whose undisturbed time is above the high
    end of as many others as are asked for cannot be among them.

    Raises
    ------
    PlanError
        If none of them fits into memory when perturbed (exit code 1).
    """
    kept: dict[int, tuple[Found, StepResult]] = {}
    refused: dict[str, int] = {}
    number = 0
    for entry in found[:ROBUST_MOST]:
        highs = sorted(_least_high(kept).values())
        limit = highs[request.top - 1] if len(highs) >= request.top else float("inf")
        if entry.result.step_time_s > limit:
            break
        number += 1
        inputs = replace(entry.result.inputs, perturbation=perturbation)
        try:
            quick = simulate_step(inputs, ranges=False, models=models)
        except StrategyError as error:
            # A kernel that takes even rows only has no perturbed time; its layout is there with others as well.
            refused[str(error)] = refused.get(str(error), 0) + 1
            continue
        if quick.step_time_s <= limit and quick.fullest.total_bytes <= request.limit_bytes:
            kept[id(entry)] = entry, simulate_step(inputs, models=models)
            say(f"{len(kept)} perturbed, least high end {min(_least_high(kept).values()):.4g} s")
    if not kept:
        also = "".join(f"; {count} were left out: {reason}" for reason, count in sorted(refused.items()))
        raise PlanError(
            f"none of the {number} fastest plans fits {request.limit_bytes / 1e9:.1f} GB a GPU under "
            f"{perturbation}; use more GPUs, allow more recompute, or perturb less{also}",
            exit_code=1,
        )
    ordered = sorted(kept.values(), key=lambda pair: pair[1].high_s)
    message = (
        f"the {number} fastest plans undisturbed were perturbed; a setting that only helps a disturbed run is missed"
    )
    findings = [Finding("robust_among_fastest", message)]
    findings += [
        Finding("not_perturbed", f"{count} of the fastest plans were left out: under {perturbation}, {reason}")
        for reason, count in sorted(refused.items())
    ]
    return [entry for entry, _ in ordered], {id(entry): result for entry, result in ordered}, findings


def perturbed_step(
    inputs: StepInputs, perturbation: Perturbation, models: dict[object, object]
) -> tuple[StepResult | None, list[Finding]]:
    """A plan's step perturbed, with ranges, and what is to be said about it.

    Where a kernel of a pair refuses the perturbation (one that takes even
    rows only), the pairs of as few strategies as can be run one after another.

    Returns
    -------
    StepResult or None
        None where it cannot run so either (finding ``not_perturbed``).
    list of Finding
        ``perturbed_serially`` where pairs are not overlapped.
    """
    asked, reason = replace(inputs, perturbation=perturbation), ""
    pairs = inputs.composition.pairs
    names = sorted({chosen.strategy.name for chosen in pairs.values()})
    for count in range(len(names) + 1):
        for dropped in itertools.combinations(names, count):
            kept = {key: chosen for key, chosen in pairs.items() if chosen.strategy.name not in dropped}
            try:
                tried = replace(asked, composition=replace(asked.composition, pairs=kept))
                found = simulate_step(tried, models=models)
            except StrategyError as error:
                reason = reason or str(error)
                continue
            if not dropped:
                return found, []
            how = f"in the perturbed time what {', '.join(dropped)} overlaps runs one after another"
            return found, [Finding("perturbed_serially", f"{how}: under {perturbation}, {reason}")]
    return None, [Finding("not_perturbed", f"no perturbed time: under {perturbation}, {reason}")]


def _least_high(kept: Mapping[int, tuple[Found, StepResult]]) -> dict[tuple[object, ...], float]:
    """Least high end of each layout."""
    found: dict[tuple[object, ...], float] = {}
    for entry, result in kept.values():
        key = degrees_of(entry)
        found[key] = min(found.get(key, float("inf")), result.high_s)
    return found
