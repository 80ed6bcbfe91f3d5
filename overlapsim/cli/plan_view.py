"""How the answer of `plan` is shown: JSON with stable keys, or tables and sentences for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from overlapsim.cli.output import console, together
from overlapsim.cli.simulate_view import LOUD
from overlapsim.plan import Gain, Prediction, StepCandidate, StepPlan
from overlapsim.planner.explain import exposed_s
from overlapsim.planner.step import StepAnswer
from overlapsim.units import format_bytes, format_parameter, format_time

MOST_REASONS: Final = 6


def answer_json(plan: StepPlan, answer: StepAnswer) -> dict[str, Any]:
    """Content of the JSON answer; keys carry units, see docs/cli.md."""
    return {
        "feasible": True,
        "plans": [_entry(entry, plan) for entry in (plan.choice, *plan.alternatives)],
        "best_serial": None if plan.serial is None else _entry(plan.serial, plan),
        "try_on_hardware": msgspec.to_builtins(plan.advice.try_on_hardware),
        "measure_next": msgspec.to_builtins(plan.advice.measure_next),
        "gains": msgspec.to_builtins(plan.advice.gains),
        "pruned": dict(plan.search.pruned),
        "searched": plan.search.candidates,
        "elapsed_s": answer.elapsed_s,
    }


def infeasible_json(elapsed_s: float) -> dict[str, Any]:
    """The JSON answer where no plan exists; the message on stderr says why and what would change it."""
    return {
        "feasible": False,
        "plans": [],
        "best_serial": None,
        "try_on_hardware": [],
        "measure_next": [],
        "gains": [],
        "pruned": {},
        "searched": 0,
        "elapsed_s": elapsed_s,
    }


def layout_json(entry: StepCandidate) -> dict[str, Any]:
    """A plan's layout and settings in one mapping."""
    s = entry.settings
    named = {"nodes": s.nodes, **s.layout, "micro_batch": s.micro_batch, "num_micro_batches": s.num_micro_batches}
    named |= {"schedule": s.schedule, "recompute": recompute_name(entry), "dp_overlap": s.dp_overlap, "fp8": s.fp8}
    named |= {"dispatcher": s.dispatcher} if s.layout["ep"] != 1 else {}
    named |= {"compress": "+".join(s.compress)} if s.compress else {}
    named |= {"dispatch_dtype": s.dispatch_dtype} if s.dispatch_dtype else {}
    return named | ({"stage_layers": list(s.stage_layers)} if s.stage_layers else {})


def recompute_name(entry: StepCandidate) -> str:
    """What is recomputed, as ``simulate --recompute`` reads it."""
    return "+".join(entry.settings.recompute_modules) or entry.settings.recompute


def _entry(entry: StepCandidate, plan: StepPlan) -> dict[str, Any]:
    perturbed = entry.perturbed
    shown = perturbed if plan.inputs.objective == "robust" and perturbed else entry.step
    return {
        "rank": entry.rank,
        "layout": layout_json(entry),
        "strategies": [
            {"operator": op.operator, "pass": op.pass_, "strategy": op.strategy, "parameters": dict(op.parameters)}
            for op in entry.operators
        ]
        + [
            {"operator": "*", "pass": "*", "strategy": name, "parameters": dict(parameters)}
            for name, parameters in entry.settings.arranging
        ],
        "step_time_s": shown.value_s,
        "low_s": shown.low_s,
        "high_s": shown.high_s,
        "undisturbed_s": entry.step.value_s,
        "perturbed_s": None if perturbed is None else perturbed.value_s,
        "perturbed_low_s": None if perturbed is None else perturbed.low_s,
        "perturbed_high_s": None if perturbed is None else perturbed.high_s,
        "mfu": entry.mfu,
        "memory_bytes": sum(entry.memory_bytes.values()),
        "exposed_s": exposed_s(entry.breakdown_s),
        "lower_bound_s": entry.lower_bound_s,
        "findings": msgspec.to_builtins((*plan.findings, *entry.findings)),
    }


def plan_table(plan: StepPlan, answer: StepAnswer) -> None:
    """Print the plans, what is to be said about them, what was left out, and the findings."""
    view, asked = console(), plan.inputs
    robust = asked.objective == "robust"
    batch = f"{asked.global_batch} sequences of {asked.seq_len} tokens"
    request = answer.request
    title = f"{request.model.name} on {request.cluster.num_devices} GPUs of {request.cluster.name}: {batch}"
    view.print(f"[bold]{title}[/bold]; {plan.search.candidates:,} candidates, {plan.search.run:,} run in the engine, "
               f"{format_time(answer.elapsed_s)}", highlight=False)  # fmt: skip
    also = bool(asked.perturbation) and not robust
    order = f" under {asked.perturbation}, by their high end" if robust else ""
    order = f" undisturbed; --objective robust ranks under {asked.perturbation}" if also else order
    table = Table(title=f"best plans{order}")
    table.title_justify = "left"
    for column in ("rank", "layout", "settings"):
        table.add_column(column)
    times = ("perturbed", "its 90 % range", "undisturbed", "MFU undisturbed", "a GPU", "exposed undisturbed")
    for column in times if robust else ("step", "90 % range", "MFU", "a GPU", "exposed"):
        table.add_column(column, justify="right")
    for column in ("perturbed", "its 90 % range") if also else ():
        table.add_column(column, justify="right")
    serial = [plan.serial] if plan.serial is not None and not plan.serial.rank else []
    for entry in (plan.choice, *plan.alternatives, *serial):
        table.add_row(
            str(entry.rank) if entry.rank else "no overlap strategies",
            _layout(entry, asked.nodes),
            _settings(entry),
            *(_perturbed(entry) if robust else _time(entry.step)),
            *((format_time(entry.step.value_s),) if robust else ()),
            f"{entry.mfu:.1%}",
            format_bytes(sum(entry.memory_bytes.values())),
            format_time(exposed_s(entry.breakdown_s)),
            *(_perturbed(entry) if also else ()),
        )
    view.print(table)
    _sentences(view, "strategies of plan 1", _strategies(plan.choice))
    of = " (of the undisturbed step)" if robust else ""
    _sentences(view, "order of operators in plan 1", plan.advice.order)
    _sentences(view, f"why the first{of}", plan.advice.why)
    _sentences(view, f"what each part of plan 1 gains{of}", [_gain(gain) for gain in plan.advice.gains])
    _sentences(view, f"near{of}", plan.advice.near)
    _sentences(view, f"exposed in plan 1{of}", plan.advice.exposed)
    _sentences(
        view, "try on hardware first", [f"plan {trial.rank}: {trial.reason}" for trial in plan.advice.try_on_hardware]
    )
    _sentences(
        view,
        "measure next",
        [
            f"{m.message}: the range of {m.family} alone moves plan {m.ranks[1]} against plan {m.ranks[0]} from "
            f"{_signed(m.low_s)} to {_signed(m.high_s)}"
            for m in plan.advice.measure_next
        ],
    )
    _sentences(view, "left out", [f"{count:,} {reason}" for reason, count in _reasons(plan)])
    findings = together((*plan.findings, *plan.choice.findings))
    for finding in sorted(findings, key=lambda finding: finding.code not in LOUD):
        style = "bold red" if finding.code in LOUD else None
        view.print(f"finding {finding.code}: {finding.message}", style=style, highlight=False, markup=False)


def _sentences(view: Console, title: str, sentences: Sequence[str]) -> None:
    if sentences:
        view.print(f"[bold]{title}[/bold]", highlight=False)
    for sentence in sentences:
        view.print(f"  {sentence}", highlight=False, markup=False)


def _layout(entry: StepCandidate, num_nodes: int) -> str:
    """Degrees that say something; the nodes where a plan leaves some free."""
    layout = entry.settings.layout
    shown = {"tp": 0, "sp": 1, "cp": 1, "ep": 1, "pp": 0, "vpp": 1, "dp": 0, "zero": 0, "hsdp": 1}
    words = [f"on {entry.settings.nodes} of {num_nodes} nodes"] if entry.settings.nodes != num_nodes else []
    words += [f"{key} {layout[key]}" for key, plain in shown.items() if layout[key] != plain]
    words += [f"etp {layout['etp']}"] if layout["ep"] != 1 else []
    words += ["no sequence parallelism"] if not layout["sequence_parallel"] and layout["tp"] != 1 else []
    return ", ".join(words)


def _settings(entry: StepCandidate) -> str:
    s = entry.settings
    words = [f"micro-batch {s.micro_batch} x {s.num_micro_batches}"]
    words += [s.schedule] if s.layout["pp"] != 1 else []
    words += [f"recompute {recompute_name(entry)}"] if s.recompute != "none" else []
    words += [f"dp overlap {s.dp_overlap}"] if s.dp_overlap != "none" else []
    words += ["fp8"] if s.fp8 else []
    words += [f"dispatch by {s.dispatcher}"] if s.dispatcher != "all_to_all" and s.layout["ep"] != 1 else []
    words += [f"dispatch in {s.dispatch_dtype}"] if s.dispatch_dtype else []
    words += s.compress
    words += [name for name, _ in s.arranging]
    counts = Counter(op.strategy for op in entry.operators)
    words += [f"{name} on {count} operator{'s'[: count > 1]}" for name, count in counts.items()]
    return ", ".join(words)


def _strategies(entry: StepCandidate) -> list[str]:
    """Operators by the strategy that takes them."""
    taken: dict[str, list[str]] = {}
    for op in entry.operators:
        taken.setdefault(op.strategy, []).append(f"{op.operator}:{op.pass_}")
    whole = [f"{name} in every layer: {_parameters(parameters)}" for name, parameters in entry.settings.arranging]
    return whole + [f"{name}: {', '.join(operators)}" for name, operators in taken.items()]


def _parameters(parameters: Mapping[str, Any]) -> str:
    return ", ".join(format_parameter(name, value) for name, value in parameters.items())


def _gain(gain: Gain) -> str:
    """One line of what parts gain."""
    first = gain.in_all == gain.faster == 1
    times = "" if first else f", {gain.faster:.3f}x the one before, {gain.in_all:.3f}x the first"
    return f"{gain.name} ({gain.layout}): {format_time(gain.step_time_s)}{times}"


def _perturbed(entry: StepCandidate) -> tuple[str, str]:
    return _time(entry.perturbed) if entry.perturbed else ("-", "-")


def _time(shown: Prediction) -> tuple[str, str]:
    return format_time(shown.value_s), f"{format_time(shown.low_s)} .. {format_time(shown.high_s)}"


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_time(abs(seconds))}"


def _reasons(plan: StepPlan) -> list[tuple[str, int]]:
    return sorted(plan.search.pruned.items(), key=lambda item: (-item[1], item[0]))[:MOST_REASONS]
