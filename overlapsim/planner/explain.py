"""Says why the best plan is best, what nearly was and what it exposes; with what to try and to measure: advice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from overlapsim.plan import Advice
from overlapsim.planner.pair_choice import WHICH
from overlapsim.planner.step import Ranked, StepAnswer
from overlapsim.planner.step_bound import step_operators
from overlapsim.planner.trials import difference, find_trials, measurements, percent, range_text, slower
from overlapsim.step.categories import COMM_KINDS, COMPUTE_KINDS
from overlapsim.step.pieces import graph_builder
from overlapsim.step.run_graph import with_engine
from overlapsim.step.simulate import StepResult, step_prices
from overlapsim.strategy.base import Context
from overlapsim.units import format_bytes, format_time
from overlapsim.workload.operators import CollectiveOp

NAMED: Final = 3
"""Parts that a sentence names."""
LITTLE: Final = 0.005
"""Share of a step below which nothing is said about a part of it."""
KIND_NAMES: Final[Mapping[str, str]] = {
    "gemm": "GEMMs",
    "attention": "attention",
    "other_compute": "other kernels",
    "optimizer": "the optimizer",
    "exposed_tp": "exposed tensor-parallel traffic",
    "exposed_sp": "exposed Ulysses traffic",
    "exposed_ep": "exposed expert traffic",
    "exposed_cp": "exposed context traffic",
    "exposed_pp": "exposed pipeline transfers",
    "exposed_dp": "exposed data-parallel traffic",
    "bubble": "the pipeline bubble",
    "host": "launches and gaps of kernels",
}
_GROUP_KINDS: Final = {"tp": ("tp", "etp"), "sp": ("sp",), "ep": ("ep", "etp_ep"), "cp": ("cp",)}


def advise(answer: StepAnswer) -> Advice:
    """All that is said about an answer."""
    trials = tuple(find_trials(answer.ranked))
    return Advice(
        why=tuple(_why(answer)),
        near=tuple(_near(answer.ranked)),
        exposed=tuple(_exposed(answer.ranked[0])),
        try_on_hardware=trials,
        measure_next=tuple(measurements(answer.ranked, trials)),
        gains=answer.gains,
        order=tuple(_orders(answer.ranked[0].result)),
    )


def label(result: StepResult) -> str:
    """A plan in a few words."""
    i = result.inputs
    words = [str(i.layout), f"micro-batch {i.job.micro_batch}"]
    if i.layout.pp > 1:
        words.append(i.schedule_name)
    if i.recompute.granularity != "none":
        name = "+".join(sorted(i.recompute.modules)) or i.recompute.granularity
        words.append(f"recompute {name}")
    if i.dp_overlap != "none":
        words.append(f"overlaps {i.dp_overlap}" + (" of data parallelism" if i.dp_overlap == "gradients" else ""))
    if i.recipe.fp8:
        words.append("fp8")
    words += i.recipe.compress
    if i.layout.ep > 1 and i.recipe.dispatcher != "all_to_all":
        words.append(f"dispatch by {i.recipe.dispatcher}")
    words += sorted({strategy.name for strategy in i.composition.strategies})
    return ", ".join(words)


def exposed_s(breakdown_s: Mapping[str, float]) -> float:
    """Seconds in which a device communicates and computes nothing."""
    return sum(breakdown_s.get(kind, 0.0) for kind in COMM_KINDS)


def _orders(result: StepResult) -> Iterator[str]:
    """How strategies that arrange whole graphs issue the operators of each kind of layer, where they say so."""
    i, prices = result.inputs, step_prices(result.inputs)
    builder = graph_builder(i)
    for number, layer in enumerate(i.model.kinds, start=1):
        of = f" of kind {number}" if len(i.model.kinds) > 1 else ""
        for which in WHICH:
            graph = builder.layer(layer, which)
            own = {(op.name, op.pass_) for op in graph.operators}
            pairs = {key: taken for key, taken in i.composition.pairs.items() if key in own}
            context = with_engine(Context(graph, prices, pairs), contention=i.contention)
            for chosen in i.composition.arranging:
                if not chosen.strategy.applies_to(context).applies:
                    continue
                said = chosen.strategy.settings(context, chosen.parameters)
                if "order" in said:
                    beside = ", ".join(said.get("beside", ())) or "none"
                    yield f"{which} of a layer{of}: {', '.join(said['order'])}; beside computation: {beside}"


# Why, and what nearly won


def _why(answer: StepAnswer) -> Iterator[str]:
    best = answer.ranked[0].result
    for other in answer.ranked[1:2]:
        yield _compared(best, other.result, other.rank, by_high_end=answer.goal.objective == "robust")
    serial = answer.serial
    if not best.inputs.composition.strategies:
        yield "no overlap strategy is in the best plan: where one applies, none saves enough of its pair"
    elif serial is not None:
        gap = difference(best, serial.result)
        ratio, names = (
            serial.result.step_time_s / best.step_time_s,
            sorted({s.name for s in best.inputs.composition.strategies}),
        )
        yield (
            f"{', '.join(names)} make it {ratio:.3f}x as fast as the best plan without overlap strategies "
            f"({label(serial.result)}: {format_time(serial.result.step_time_s)}; the difference is "
            f"{range_text(gap)})"
        )
    compute, bound_s = sum(best.breakdown_s[kind] for kind in COMPUTE_KINDS), answer.ranked[0].lower_bound_s
    # What is on the wire may take longer than all that is computed.
    yield (
        f"computation is {format_time(compute)} of {format_time(best.step_time_s)}, and the hardware forbids this "
        f"layout less than {format_time(bound_s)}: hiding all the rest would make it "
        f"{best.step_time_s / max(compute, bound_s):.2f}x as fast at most"
    )


def _compared(best: StepResult, other: StepResult, rank: int, *, by_high_end: bool) -> str:
    gap = difference(best, other)
    parts = sorted(KIND_NAMES, key=lambda kind: -abs(_change(best, other, kind)))
    told = [
        f"{KIND_NAMES[kind]} {format_time(abs(change))} {'less' if change > 0 else 'more'}"
        for kind in parts[:NAMED]
        if abs(change := _change(best, other, kind)) >= LITTLE * best.step_time_s
    ]
    place = "first under the perturbation; undisturbed" if by_high_end else "first:"
    return f"plan 1 is {place} plan {rank} ({label(other)}) is {slower(gap, best)} (difference {range_text(gap)})" + (
        f"; plan 1 has {', '.join(told)}" if told else "; no part of the step differs much"
    )


def _change(best: StepResult, other: StepResult, kind: str) -> float:
    return other.breakdown_s[kind] - best.breakdown_s[kind]


def _near(ranked: Sequence[Ranked]) -> Iterator[str]:
    best = ranked[0].result
    for entry in ranked[1:]:
        gap = difference(best, entry.result)
        if gap.low_s <= 0:
            yield (
                f"plan {entry.rank} ({label(entry.result)}) is {slower(gap, best)} and may be "
                f"the better one: the difference is {range_text(gap)}"
            )
    for entry in ranked[:1]:
        for twin in entry.twins:
            gap = difference(best, twin)
            yield f"plan 1 with other settings ({label(twin)}) is {slower(gap, best)} and needs {_memory(best, twin)}"


def _memory(best: StepResult, twin: StepResult) -> str:
    more = twin.fullest.total_bytes - best.fullest.total_bytes
    if abs(more) < LITTLE * best.fullest.total_bytes:
        return "as much memory"
    return f"{format_bytes(abs(more))} {'less' if more < 0 else 'more'} of a GPU"


# What is exposed


def _exposed(entry: Ranked) -> Iterator[str]:
    result = entry.result
    shown = [(kind, result.breakdown_s[kind]) for kind in (*COMM_KINDS, "bubble", "host")]
    for kind, seconds in sorted(shown, key=lambda pair: -pair[1]):
        if seconds >= LITTLE * result.step_time_s:
            share = percent(seconds / result.step_time_s)
            yield f"{KIND_NAMES[kind]}: {format_time(seconds)} ({share}); {_cause(kind, result)}"


def _cause(kind: str, result: StepResult) -> str:
    i = result.inputs
    micro = i.num_micro_batches
    if kind == "bubble":
        return (
            f"{i.layout.pp} stages fill and drain around {micro} micro-batches ({i.schedule_name}); more "
            "micro-batches, more chunks a stage or fewer stages shorten it"
        )
    if kind == "exposed_pp":
        return f"transfers between {i.layout.pp} stages are {i.p2p_mode}"
    if kind == "exposed_dp":
        rest = {"none": "nothing of it is overlapped", "gradients": "the last gradients and parameters gathered at the"
                " end have nothing to hide under", "both": "the first parameters and the last gradients have nothing to"
                " hide under"}  # fmt: skip
        return rest[i.dp_overlap]
    if kind == "host":
        return "kernels wait for their launches, and streams for each other"
    groups = _GROUP_KINDS[kind.removeprefix("exposed_")]
    totals = _traffic(result, groups)
    whole = sum(totals.values())
    taken = [f"{name}:{pass_}" for name, pass_ in i.composition.pairs]
    largest = sorted(totals, key=lambda key: -totals[key])[:NAMED]
    hidden = max(0.0, 1 - result.breakdown_s[kind] / whole) if whole else 0.0
    return f"{percent(hidden)} of {format_time(whole)} is hidden; most is of {', '.join(largest)}" + (
        f"; strategies take {', '.join(taken)}" if taken else "; no strategy takes any of it"
    )


def _traffic(result: StepResult, groups: Sequence[str]) -> dict[str, float]:
    """Seconds of a step's collectives over some groups, alone, by what they serve."""
    prices = step_prices(result.inputs)
    found: dict[str, float] = defaultdict(float)
    for op, times in step_operators(result.inputs):
        if isinstance(op, CollectiveOp) and op.group in groups:
            found[f"{op.name} {op.pass_}"] += times * prices.operator_s(op)
    return found
