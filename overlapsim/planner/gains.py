"""What each part of a plan gains: parallelism, ways to experts, order of operators, overlap inside them, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from overlapsim.errors import DeadlockError, LayoutError, PlanError, StrategyError
from overlapsim.plan import Gain
from overlapsim.planner.refine import PAIRED
from overlapsim.planner.search import PlanRequest, search
from overlapsim.planner.space import OVERLAPS, Constraint
from overlapsim.step.inputs import StepInputs
from overlapsim.step.simulate import step_prices, step_seconds
from overlapsim.strategy.compose import Composition

SPLIT_BY_TENSORS: Final = ("tp>=2", "sp=1", "cp=1", "ep=1", "etp>=2")
"""Attention and experts both split by tensor parallelism: where others begin (TP+TP of MegaScale-MoE's Table 5)."""


def gains_of(request: PlanRequest, best: StepInputs, models: dict[object, object]) -> tuple[Gain, ...]:
    """Steps from the library's kernels in a layout of tensor parallelism to the best plan, each with its time.

    Parameters
    ----------
    request : what was asked
    best : the best plan's step, undisturbed
    models : results of cost models
    """
    found: dict[str, Gain] = {}
    for part, what, inputs in _steps(request, best):
        if part in found:
            continue
        try:
            seconds = step_seconds(inputs, step_prices(inputs, models))
        except (DeadlockError, LayoutError, StrategyError):
            # A strategy that counts on another one is told with it.
            continue
        told = list(found.values())
        first, before = (told[0].step_time_s, told[-1].step_time_s) if told else (seconds, seconds)
        name = f"{part}: {what}" if what else part
        found[part] = Gain(name, str(inputs.layout), seconds, before / seconds, first / seconds)
    return tuple(found.values())


def _steps(request: PlanRequest, best: StepInputs) -> Iterator[tuple[str, str, StepInputs]]:
    """What is added, in words, and the step with it; of one part the first that the engine runs counts."""
    exact = replace(best.recipe, fp8=request.recipe.fp8, compress=request.recipe.compress)
    exact = replace(exact, dispatch=request.recipe.dispatch)
    given = replace(exact, dispatcher=request.recipe.dispatcher)
    if best.layout.ep > 1:
        base = _tensor_parallel(request, best)
        if base is not None:
            yield "tensor parallelism of attention and experts", "", base
    unpaired = "interleaved" if best.schedule == PAIRED else best.schedule
    plain = replace(best, recipe=given, schedule=unpaired, composition=Composition())
    yield "the best plan's layout", "", plain
    if exact != given:
        plain = replace(plain, recipe=exact)
        yield "tokens to experts", exact.dispatcher, plain
    chosen = best.composition
    # Strategies for whole graphs may count on SMs that those of pairs leave: then on fewer of them.
    for arranging in dict.fromkeys((len(chosen.arranging), 1, 0)):
        names = [entry.strategy.name for entry in chosen.arranging[-arranging:]] if arranging else []
        names += [best.schedule] * (best.schedule != unpaired)
        if names:
            kept = replace(chosen, pairs={}, arranging=chosen.arranging[-arranging:] if arranging else ())
            yield "between operators", ", ".join(names), replace(plain, schedule=best.schedule, composition=kept)
    if chosen.pairs:
        names = sorted({entry.strategy.name for entry in chosen.pairs.values()})
        yield "inside operators", ", ".join(names), replace(plain, schedule=best.schedule, composition=chosen)
    if best.recipe != exact:
        names = [*(["fp8"] if best.recipe.fp8 != exact.fp8 else []), *best.recipe.compress]
        names += [f"dispatch in {best.recipe.dispatch.dtype}"] if best.recipe.dispatch != exact.dispatch else []
        yield "allowed, and changing results", ", ".join(names), best


def _tensor_parallel(request: PlanRequest, best: StepInputs) -> StepInputs | None:
    """The fastest step with tensor parallelism alone within layers, without strategies; None where there is none."""
    axes = replace(request.axes, overlap=OVERLAPS[:1])
    rules = (*request.constraints, *map(Constraint.parse, SPLIT_BY_TENSORS))
    asked = replace(request, cluster=best.cluster, axes=axes, constraints=rules, top=1, exhaustive=False)
    try:
        return search(asked).best[0].result.inputs
    except PlanError:
        return None
