"""Ranked plans of a step as a picture: where each plan's time goes, and its range."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from overlapsim.plan import StepCandidate, StepPlan
from overlapsim.report.figures import COLOURS, INK, check_target, plain_frame, write_figure
from overlapsim.units import format_time

_PARTS: Final = (
    ("GEMMs", ("gemm",)),
    ("attention", ("attention",)),
    ("other kernels", ("other_compute", "optimizer")),
    ("exposed traffic", ("exposed_tp", "exposed_sp", "exposed_ep", "exposed_cp", "exposed_pp", "exposed_dp")),
    ("bubble and host", ("bubble", "host")),
)
_SHADES: Final = (COLOURS[0], COLOURS[2], COLOURS[4], COLOURS[1], "#c9ccd2")


def plan_plot(plan: StepPlan, path: str | Path) -> None:
    """Draw one bar a plan, split by what runs, with its 90 % range and lower bound, and write a PNG or SVG file.

    Raises
    ------
    UsageError
        If the suffix is another one, or `path` cannot be written.
    """
    check_target(path)
    write_figure(plan_figure(plan), path)


def plan_figure(plan: StepPlan) -> Figure:
    """As `plan_plot`, the figure itself."""
    entries = [plan.choice, *plan.alternatives]
    if plan.serial is not None and not plan.serial.rank:
        entries.append(plan.serial)
    figure = Figure(figsize=(11, 1.6 + 0.62 * len(entries)), layout="constrained")
    axes = figure.add_subplot()
    plain_frame(axes)
    places = range(len(entries))
    left = [0.0] * len(entries)
    for (name, kinds), colour in zip(_PARTS, _SHADES, strict=True):
        widths = [sum(entry.breakdown_s.get(kind, 0.0) for kind in kinds) for entry in entries]
        axes.barh(places, widths, left=left, height=0.6, color=colour, label=name, zorder=2)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, entry in zip(places, entries, strict=True):
        low, high = entry.step.value_s - entry.step.low_s, entry.step.high_s - entry.step.value_s
        axes.errorbar(
            entry.step.value_s, place, xerr=[[low], [high]], color=INK, capsize=3, linewidth=1, zorder=3,
            label="90 % range" if place == 0 else None,
        )  # fmt: skip
        axes.plot(
            [entry.lower_bound_s], [place], marker="|", markersize=16, color=COLOURS[3], linestyle="none", zorder=3,
            label="lower bound" if place == 0 else None,
        )  # fmt: skip
        text = format_time(entry.step.value_s)
        axes.text(entry.step.high_s, place, f"  {text}", va="center", fontsize=8.5, color=INK)
    axes.set_yticks(list(places), [_name(entry) for entry in entries], fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(entry.step.high_s for entry in entries))
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("step, s")
    asked = plan.inputs
    axes.set_title(
        f"{asked.model} on {asked.nodes} node(s) of {asked.cluster}: {asked.global_batch} x {asked.seq_len} tokens",
        loc="left", fontsize=10.5, fontweight="bold",
    )  # fmt: skip
    figure.legend(loc="outside lower center", ncols=7, fontsize=8.5, frameon=False)
    return figure


def _name(entry: StepCandidate) -> str:
    layout, settings = entry.settings.layout, entry.settings
    degrees = [f"{key}{layout[key]}" for key in ("tp", "cp", "ep", "pp", "vpp", "dp") if layout.get(key, 1) != 1]
    place = f"{entry.rank}" if entry.rank else "no strategies"
    more = [] if settings.recompute == "none" else [f"{settings.recompute} recompute"]
    return f"{place}:  {' '.join([*degrees, f'mb{settings.micro_batch}', *more])}"
