"""Latency against number of groups: what the recurrence says, what the engine says, where the optimum lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from overlapsim.errors import StrategyError, UsageError
from overlapsim.planner.operator import simulate
from overlapsim.planner.partition import best_by_groups
from overlapsim.report.figures import COLOURS, FRAME, INK, check_target, plain_frame, write_figure
from overlapsim.strategy.base import Context, Parameters, Strategy
from overlapsim.units import format_time

MAX_GROUPS: Final = 12
_UNITS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


@dataclass(frozen=True)
class GroupPoint:
    """The best split into one number of groups.

    Attributes
    ----------
    num_groups : 1 is the strategy's kernel alone and then one collective
    parameters : of the split that is fastest in the engine
    recurrence_low_s, recurrence_high_s : values of the closed recurrence; they differ where a strategy states it under
        several beliefs, such as a collective that finds its SMs free or waits for them
    engine_s : time of `parameters` in the engine
    """

    num_groups: int
    parameters: Parameters
    recurrence_low_s: float
    recurrence_high_s: float
    engine_s: float


@dataclass(frozen=True)
class Mark:
    """A time to compare with: a name for people, and seconds."""

    name: str
    time_s: float


def latency_by_groups(
    context: Context,
    strategy: Strategy,
    *,
    like: Parameters | None = None,
    max_groups: int = MAX_GROUPS,
    contention: bool = True,
) -> tuple[GroupPoint, ...]:
    """Solve and run the best split for every number of groups from 1 to `max_groups`.

    Parameters
    ----------
    context : a GEMM followed by a collective, and prices
    strategy : one that splits waves into groups, such as ``wave_group``
    like : a planner's choice: its other parameters (tile ...) are kept, and it is run too, for its own number of
        groups; all that the strategy proposes when None
    max_groups : at least 1; a kernel with fewer waves ends the curve earlier
    contention : False leaves HBM and link sharing out

    Returns
    -------
    tuple of GroupPoint
        Rising in number of groups.

    Raises
    ------
    StrategyError
        If the strategy does not apply, or has no waves to split with the parameters of `like`.

    Examples
    --------
    ``latency_by_groups(result.context, load_strategy("wave_group"), like=entry.best.parameters)``
    """
    applicability = strategy.applies_to(context)
    if not applicability.applies:
        raise StrategyError(f"{strategy.name} does not apply: {'; '.join(applicability.reasons)}")
    space = strategy.parameters(context)
    kept = {} if like is None else {key: value for key, value in like.items() if key in space.grid}
    points = [point for point in space.points() if all(point[key] == value for key, value in kept.items())]
    partitions = [] if space.partitions is None else [p for point in points for p in space.partitions(point)]
    if not partitions:
        raise StrategyError(
            f"{strategy.name} has no waves to split into groups here; "
            "expected a strategy with partitions, and a kernel of two waves or more"
        )
    by_count: dict[int, list[tuple[float, Parameters]]] = {}
    for partition in partitions:
        for split in best_by_groups(partition, max_groups):
            by_count.setdefault(split.num_groups, []).append((split.value_s, partition.to_parameters(split.cuts)))
    planned = () if like is None else like.get("group_tiles", ())
    result = []
    for count, splits in sorted(by_count.items()):
        candidates = [parameters for _, parameters in splits]
        if like is not None and len(planned) == count:
            candidates.append(like)
        # Two beliefs often give one split: it is run once.
        distinct = {repr(parameters): parameters for parameters in candidates}.values()
        runs = [(simulate(strategy, context, p, contention=contention).duration_s, p) for p in distinct]
        engine_s, parameters = min(runs, key=lambda run: run[0])
        values = [value for value, _ in splits]
        result.append(GroupPoint(count, parameters, min(values), max(values), engine_s))
    return tuple(result)


def groups_plot(
    points: Sequence[GroupPoint], path: str | Path, *, serial_s: float, title: str = "", others: Sequence[Mark] = ()
) -> None:
    """Draw latency against number of groups and write a PNG or SVG file.

    Parameters
    ----------
    points : of :func:`latency_by_groups`
    path : ``.png`` (150 dpi) or ``.svg``; written whole or not at all
    serial_s : best time without overlap, drawn as a line; changes are against it
    title : above the axes
    others : further times to compare with, a line each

    Raises
    ------
    UsageError
        If there are no points, a time is not positive, the suffix is another one, or `path` cannot be written.
    """
    check_target(path)
    write_figure(groups_figure(points, serial_s=serial_s, title=title, others=others), path)


def groups_figure(
    points: Sequence[GroupPoint], *, serial_s: float, title: str = "", others: Sequence[Mark] = ()
) -> Figure:
    """Figure that :func:`groups_plot` writes; it belongs to no window and no pyplot state."""
    if not points:
        raise UsageError("no points to draw; expected at least one number of groups")
    marks = (Mark("serial", serial_s), *others)
    for mark in marks:
        if not (np.isfinite(mark.time_s) and mark.time_s > 0):
            raise UsageError(f"time of {mark.name} is {mark.time_s!r} s; expected a positive number")
    scale, unit = next((entry for entry in _UNITS if serial_s >= entry[0]), _UNITS[-1])
    figure = Figure(figsize=(8.6, 4.6), facecolor="white", layout="constrained")
    ax = figure.add_subplot()
    counts = np.array([point.num_groups for point in points])
    low, high, engine = (
        np.array([getattr(point, name) for point in points]) / scale
        for name in ("recurrence_low_s", "recurrence_high_s", "engine_s")
    )
    single = len(points) == 1
    several = bool(np.any(high > low))
    if several:
        label = "recurrence, lowest to highest"
        ax.fill_between(counts, low, high, color="#dbe4ef", linewidth=0, zorder=1, label=label)
    ax.plot(
        counts, low, color="#7fa3cc", linewidth=1.2, linestyle=(0, (4, 3)), marker="o" if single else None,
        zorder=2, label="recurrence, lowest" if several else "recurrence",
    )  # fmt: skip
    ax.plot(counts, engine, color=COLOURS[0], linewidth=1.8, marker="o", markersize=5.5, zorder=4, label="engine")
    best = int(np.argmin(engine))
    ax.plot(
        counts[best], engine[best], linestyle="none", marker="o", markersize=11, markerfacecolor="none",
        markeredgecolor=COLOURS[3], markeredgewidth=1.8, zorder=5,
    )  # fmt: skip
    _set_axes(ax, counts, np.concatenate([low, high, engine, [mark.time_s / scale for mark in marks]]), unit)
    _draw_marks(ax, marks, scale, serial_s)
    _name_best(ax, points[best], engine[best], serial_s)
    if title:
        ax.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=12, color=INK)
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


def _set_axes(ax: Axes, counts: np.ndarray, values: np.ndarray, unit: str) -> None:
    low, high = float(values.min()), float(values.max())
    room = max(high - low, 0.02 * high)
    ax.set_ylim(low - 0.30 * room, high + 0.14 * room)
    ax.set_xlim(float(counts[0]) - 0.4, float(counts[-1]) + 0.4)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16, min_n_ticks=1))
    ax.set_xlabel("number of groups", fontsize=9.5)
    ax.set_ylabel(f"latency ({unit})", fontsize=9.5)
    plain_frame(ax)


def _draw_marks(ax: Axes, marks: Sequence[Mark], scale: float, serial_s: float) -> None:
    for number, mark in enumerate(marks):
        colour = INK if number == 0 else FRAME
        ax.axhline(mark.time_s / scale, color=colour, linewidth=1.1, linestyle="-" if number == 0 else (0, (2, 2)))
        ax.annotate(
            f"{mark.name}: {_time(mark.time_s)}{_change(mark.time_s, serial_s)}", (1, mark.time_s / scale),
            xycoords=("axes fraction", "data"), xytext=(-4, 3), textcoords="offset points", ha="right", va="bottom",
            fontsize=8.5, fontweight="bold" if number == 0 else "normal", color=INK, zorder=6,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )  # fmt: skip


def _name_best(ax: Axes, point: GroupPoint, value: float, serial_s: float) -> None:
    groups = f"{point.num_groups} group{'s' if point.num_groups > 1 else ''}"
    tiles = point.parameters.get("group_tiles", ())
    if 1 < len(tiles) <= 8:
        groups += f" of {', '.join(str(count) for count in tiles)} tiles"
    text = f"best: {_time(point.engine_s)}{_change(point.engine_s, serial_s)}\n{groups}"
    low, high = ax.get_xlim()
    place = (point.num_groups - low) / (high - low)
    # The strip below all curves is kept free for this text.
    ax.annotate(
        text, (point.num_groups, value), xytext=(place, 0.03), textcoords="axes fraction",
        ha="left" if place < 0.5 else "right", va="bottom", fontsize=8.5, color=COLOURS[3], fontweight="bold", zorder=6,
        arrowprops={"arrowstyle": "-", "color": COLOURS[3], "linewidth": 0.8, "relpos": (0 if place < 0.5 else 1, 1),
                    "shrinkA": 0, "shrinkB": 6},
    )  # fmt: skip


def _time(seconds: float) -> str:
    return format_time(seconds).replace("us", "µs")


def _change(time_s: float, serial_s: float) -> str:
    if time_s == serial_s:
        return ""
    return f" ({100 * (time_s / serial_s - 1):+.1f} %)".replace("-", "\N{MINUS SIGN}")
