"""How the answer of `operator` is shown: JSON with stable keys, or tables for people."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from rich.table import Table

from overlapsim.cli.output import console
from overlapsim.planner.operator import TIE_MARGIN, OperatorResult, StrategyResult, compute_and_communication_s
from overlapsim.units import format_time

_WORDS: Final = {("sms", "steal"): "SMs taken as CTAs retire", ("sms", "reserve"): "SMs reserved"}


_CAUSES: Final = {
    "under_one_wave": "all tiles of the GEMM run at once, so that nothing is ready early",
    "few_tiles": "pieces of this GEMM have too few tiles to fill the GPU",
    "small_message": "pieces are so small that latency and launches cost more than is hidden",
    "kernel_slower": "the kernel that overlapping needs is slower than the library's by more than is hidden",
    "little_to_hide": "communication is so short beside the GEMM that hiding it gains little",
    "link_bound": "communication takes so much longer than the GEMM that there is little to hide it under",
    "contention": "SMs, memory and links that communication takes slow the GEMM by more than is hidden",
}
_PLACES: Final = {"after": "{0}, {1}", "before": "{1}, then {0}", "independent": "{0} beside an independent {1}"}


def result_json(result: OperatorResult) -> dict[str, Any]:
    """Content of the JSON answer; keys carry units, see docs/cli.md."""
    content = {
        "serial_s": result.serial.prediction and result.serial.prediction.value_s,
        "ceiling": result.ceiling,
        "lower_bound_s": result.lower_bound_s,
        "verdict": result.verdict,
        "cause": result.cause,
        "best": result.best.strategy.name,
        "strategies": [_entry(entry) for entry in result.results],
        "findings": msgspec.to_builtins(result.findings),
    }
    return content


def _entry(entry: StrategyResult) -> dict[str, Any]:
    prediction = entry.prediction
    return {
        "name": entry.strategy.name,
        "applies": entry.applicability.applies,
        "reasons": list(entry.applicability.reasons),
        "predicted_s": prediction and prediction.value_s,
        "low_s": prediction and prediction.low_s,
        "high_s": prediction and prediction.high_s,
        "speedup": entry.speedup or None,
        "speedup_low": entry.speedup_low or None,
        "speedup_high": entry.speedup_high or None,
        "parameters": {} if entry.best is None else msgspec.to_builtins(entry.best.parameters),
        "findings": msgspec.to_builtins(entry.findings),
    }


def result_table(result: OperatorResult) -> None:
    """Print the strategies, the verdict and the findings."""
    view = console()
    pair = result.context.pair()
    gemm, collective = pair.gemm, pair.collective
    prices = result.context.prices
    table = Table(
        title=f"{_PLACES[pair.relation].format(f'{gemm.m} x {gemm.n} x {gemm.k} {gemm.dtype}', collective.kind)} over "
        f"{collective.ranks} ranks, {prices.cluster.name}"
    )
    for column in ("strategy", "predicted", "90 % range", "speed-up over best serial", "parameters"):
        table.add_column(column)
    refused = []
    for entry in result.results:
        if entry.prediction is None or entry.best is None:
            refused.append((entry.strategy.name, "; ".join(entry.applicability.reasons)))
            continue
        mark = " *" if entry is result.best else ""
        table.add_row(
            entry.strategy.name + mark,
            format_time(entry.prediction.value_s),
            f"{format_time(entry.prediction.low_s)} .. {format_time(entry.prediction.high_s)}",
            f"{entry.speedup:.2f}x ({entry.speedup_low:.2f} .. {entry.speedup_high:.2f})",
            _parameters(entry),
        )
    view.print(table)
    compute_s, communication_s = compute_and_communication_s(result.context)
    view.print(
        f"GEMM {format_time(compute_s)}, {collective.kind} {format_time(communication_s)} alone, each by its fastest "
        "kernel or transport",
        highlight=False,
    )
    best = result.best
    time = "" if best.prediction is None else f", {format_time(best.prediction.value_s)}"
    view.print(
        f"verdict: [bold]{result.verdict}[/bold]"
        + (f", cause {result.cause}: {_CAUSES[result.cause]}" if result.cause != "none" else "")
        + f"; winner {best.strategy.name}{time}",
        highlight=False,
    )
    view.print(
        f"{_advice(result)}; at best {result.ceiling:.2f}x (ceiling: serial over the longer of the two alone, as if it "
        f"hid the other whole), no less than {format_time(result.lower_bound_s)} (lower bound: FLOP at the dense peak, "
        "bytes over HBM and links at their rates)",
        highlight=False,
    )
    for name, reasons in refused:
        view.print(f"{name} does not apply: {reasons}", highlight=False, markup=False)
    others = {f for r in result.results if r is not result.best for f in r.findings} - set(result.best.findings)
    for finding in result.findings:
        if finding not in others:
            view.print(f"finding {finding.code}: {finding.message}", highlight=False, markup=False)
    # What is believed of strategies that were not chosen is a list of names here and whole in JSON.
    names: dict[str, list[str]] = {}
    for finding in result.findings:
        if finding in others:
            of = next(r.strategy.name for r in result.results if finding in r.findings)
            names.setdefault(finding.code, []).append(of)
    if names:
        told = "; ".join(f"{code} ({', '.join(dict.fromkeys(of))})" for code, of in names.items())
        view.print(f"findings of others, in full with --json: {told}", highlight=False, markup=False)


def _advice(result: OperatorResult) -> str:
    """What to run, in words."""
    best = result.best
    if best is result.serial:
        return f"run {best.strategy.name}" + (": no other is surely faster" if result.verdict == "tie" else "")
    if abs(best.speedup - 1) < TIE_MARGIN:
        return f"{best.strategy.name} is as fast as {result.serial.strategy.name} within {TIE_MARGIN:.0%}"
    times = f"{best.speedup:.2f}x ({best.speedup_low:.2f} to {best.speedup_high:.2f})"
    if result.verdict == "tie":
        return f"{best.strategy.name} may be {times} as fast as {result.serial.strategy.name}: measure both"
    faster = [
        r.strategy.name
        for r in result.results
        if r.prediction is not None and best.prediction is not None and r.prediction.value_s < best.prediction.value_s
    ]
    if result.verdict == "serial":
        return f"run {best.strategy.name}, {times} as fast as {result.serial.strategy.name} although nothing overlaps"
    unsure = f" ({', '.join(faster)} may be faster, or slower)" if faster else ""
    return f"run {best.strategy.name}, {times} as fast as {result.serial.strategy.name}{unsure}"


def _parameters(entry: StrategyResult) -> str:
    assert entry.best is not None
    parts = []
    for name, value in entry.best.parameters.items():
        if name == "group_tiles":
            groups = "1 group" if len(value) == 1 else f"{len(value)} groups"
            parts.append(f"{groups} of {' '.join(map(str, value))} tiles")
        elif name == "tile":
            parts.append("tile " + "x".join(map(str, value)))
        else:
            parts.append(_WORDS.get((name, value)) or f"{name} {value}")
    return ", ".join(parts)
