"""How the answer of `simulate` is shown: JSON with stable keys, or tables for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from overlapsim.cli.output import console, layout_words, together
from overlapsim.plan import Finding
from overlapsim.step.simulate import StepResult
from overlapsim.units import format_bytes, format_rate, format_time

LOUD: Final = ("device_not_calibrated", "memory_exceeded")
"""Findings that are shown first, and in bold."""
_KINDS: Final = {
    "gemm": "GEMMs",
    "attention": "attention",
    "other_compute": "other kernels",
    "optimizer": "optimizer",
    "exposed_tp": "exposed: tensor parallel",
    "exposed_sp": "exposed: Ulysses",
    "exposed_ep": "exposed: experts",
    "exposed_cp": "exposed: context",
    "exposed_pp": "exposed: pipeline transfers",
    "exposed_dp": "exposed: data parallel",
    "bubble": "waiting for an absent peer (bubble)",
    "host": "nothing runs (launches, gaps of kernels)",
}


def step_json(result: StepResult) -> dict[str, Any]:
    """Content of the JSON answer; keys carry units, see docs/cli.md."""
    return {
        "step_time_s": result.step_time_s,
        "low_s": result.low_s,
        "high_s": result.high_s,
        "tokens_per_s": result.tokens_per_s,
        "mfu": result.mfu,
        "hfu": result.hfu,
        "model_flop": result.model_flop,
        "memory_bytes": result.fullest.by_kind(),
        "breakdown_s": dict(result.breakdown_s),
        "findings": msgspec.to_builtins(result.findings),
    }


def step_table(result: StepResult) -> None:
    """Print the step, where its time goes, memory by stage and kind, and the findings."""
    view = console()
    i = result.inputs
    findings = sorted(result.findings, key=lambda finding: finding.code not in LOUD)
    for finding in findings:
        if finding.code in LOUD:
            view.print(f"finding {finding.code}: {finding.message}", style="bold red", highlight=False, markup=False)
    title = f"{i.model.name} {i.model.dtype} on {i.layout.world_size} GPUs of {i.cluster.name}: "
    title += layout_words(i.layout, i.model)
    view.print(f"[bold]{title}[/bold]", highlight=False)
    for line in _summary(result):
        view.print(line, highlight=False, markup=False)
    view.print(_breakdown(result))
    view.print(_memory(result))
    _print_findings(view, [finding for finding in findings if finding.code not in LOUD])


def _summary(result: StepResult) -> Iterator[str]:
    i = result.inputs
    each = format_rate(result.tokens_per_s / i.layout.world_size, "tokens/s")
    yield (
        f"step {format_time(result.step_time_s)} ({format_time(result.low_s)} .. {format_time(result.high_s)}), "
        f"{format_rate(result.tokens_per_s, 'tokens/s')}, {each} a GPU"
    )
    hfu = f", HFU {result.hfu:.1%} with recompute counted" if i.recompute.granularity != "none" else ""
    yield f"MFU {result.mfu:.1%} of the dense {i.model.dtype} peak{hfu}; attention counted under its mask"
    batch, count = i.job.global_batch, i.num_micro_batches
    work = f"{batch} sequences of {i.job.seq_len} tokens, {count} micro-batch(es) of {i.job.micro_batch} a replica"
    schedule = f", schedule {i.schedule_name} with {i.p2p_mode} transfers" if i.layout.pp > 1 else ""
    yield f"{work}{schedule}; data parallelism overlaps: {i.dp_overlap}"


def _breakdown(result: StepResult) -> Table:
    stages = " of the stage that ends last" if result.inputs.layout.pp > 1 else ""
    table = Table(title=f"time of a GPU{stages}", title_justify="left")
    table.add_column("what runs")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    for kind, seconds in result.breakdown_s.items():
        if seconds > 0:
            table.add_row(_KINDS[kind], format_time(seconds), f"{seconds / result.step_time_s:.1%}")
    return table


def _memory(result: StepResult) -> Table:
    """Memory by kind, a column a stage: all of them, or the first, the fullest and the last of many."""
    capacity, total = result.inputs.cluster.device.hbm_bytes, len(result.memory)
    fullest = result.memory.index(result.fullest)
    shown = list(range(total)) if total <= 4 else sorted({0, fullest, total - 1})
    table = Table(title=f"memory of a GPU by kind, of {format_bytes(capacity)}", title_justify="left")
    table.add_column("kind")
    for stage in shown:
        mark = " *" if stage == fullest and total > 1 else ""
        table.add_column(f"stage {stage}{mark}" if total > 1 else "size", justify="right")
    for kind in result.fullest.by_kind():
        sizes = [result.memory[stage].by_kind()[kind] for stage in shown]
        if any(sizes):
            table.add_row(kind, *(format_bytes(size) for size in sizes))
    totals = [result.memory[stage].total_bytes for stage in shown]
    table.add_section()
    table.add_row("all", *(f"{format_bytes(size)} ({size / capacity:.0%})" for size in totals))
    return table


def _print_findings(view: Console, findings: list[Finding]) -> None:
    for finding in together(findings):
        view.print(f"finding {finding.code}: {finding.message}", highlight=False, markup=False)
