"""Predicted against measured as a picture: a diagonal with 5 % and 10 % bands, and the errors below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from overlapsim.errors import UsageError
from overlapsim.report.figures import COLOURS, FRAME, INK, check_target, plain_frame, write_figure

Float = npt.NDArray[np.float64]

BANDS: Final = ((0.10, "#eef2f7"), (0.05, "#dbe4ef"))
WORST: Final = 5
"""Points of a panel that are numbered and named."""
MAX_NAMED: Final = 24
_MAX_TWO_LINES: Final = 12
_MAX_ID: Final = 72
_MARKERS: Final = "os^DvP*X<>"
# Times of one suite may come in several units; they share a panel.
_SECONDS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_SHOWN: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_PERCENT: Final = (-80, -50, -30, -20, -10, -5, 0, 5, 10, 20, 30, 50, 100, 200, 400, 900)
_PANEL_IN, _STRIP_IN, _LEFT_IN, _GAP_IN = 5.2, 1.9, 0.85, 0.25
_TOP_IN, _BOTTOM_IN, _BETWEEN_IN = 0.62, 1.45, 0.2
_MAX_VECTORS: Final = 4000


class Point(Protocol):
    """One measurement and its prediction: an :class:`overlapsim.accuracy.suite.Row` is one.

    Attributes
    ----------
    id : how the point is named where it is among the worst
    group : points of one group share a colour
    measured, predicted, low, high : in `unit`; `low` .. `high` is the central 90 % interval
    unit : s, ms, us and ns share a panel, every other unit has one of its own
    """

    @property
    def id(self) -> str: ...  # noqa: D102
    @property
    def group(self) -> str: ...  # noqa: D102
    @property
    def measured(self) -> float: ...  # noqa: D102
    @property
    def predicted(self) -> float: ...  # noqa: D102
    @property
    def low(self) -> float: ...  # noqa: D102
    @property
    def high(self) -> float: ...  # noqa: D102
    @property
    def unit(self) -> str: ...  # noqa: D102


def accuracy_plot(points: Sequence[Point], path: str | Path, *, title: str = "") -> None:
    """Draw predicted against measured and write a PNG or SVG file.

    Log axes, the same on both sides of the diagonal; bands of 5 % and 10 %;
    90 % ranges as thin bars; one colour and marker a group, with its number
    of points and mean absolute error in the legend.  The strip below shows
    predicted over measured, in percent, on the same axis.  The five worst
    points of a panel are numbered and named.

    Parameters
    ----------
    points : rows of an accuracy suite, times and other units mixed as they come
    path : ``.png`` (150 dpi) or ``.svg``; written whole or not at all
    title : above the panels

    Raises
    ------
    UsageError
        If there are no points, a measured or predicted value is not a
        positive number, the suffix is another one, or `path` cannot be written.
    """
    check_target(path)
    write_figure(accuracy_figure(points, title=title), path)


def accuracy_figure(points: Sequence[Point], *, title: str = "") -> Figure:
    """Figure that :func:`accuracy_plot` writes; it belongs to no window and no pyplot state."""
    if not points:
        raise UsageError("no points to draw; expected at least one measurement with its prediction")
    panels = _panels(points)
    names = list(dict.fromkeys(point.group for point in points))
    styles = {
        name: (COLOURS[i % len(COLOURS)], _MARKERS[(i % len(COLOURS) + i // len(COLOURS)) % len(_MARKERS)])
        for i, name in enumerate(names)
    }
    legend, note = _legend(points, styles)
    legend_in = 0.5 + 0.072 * max(len(line) for handle in legend for line in str(handle.get_label()).split("\n"))
    width_in = len(panels) * (_LEFT_IN + _PANEL_IN) + (len(panels) - 1) * _GAP_IN + legend_in + 0.3
    height_in = _TOP_IN + _PANEL_IN + _BETWEEN_IN + _STRIP_IN + _BOTTOM_IN
    figure = Figure(figsize=(width_in, height_in), facecolor="white")
    for number, panel in enumerate(panels):
        left_in = _LEFT_IN + number * (_LEFT_IN + _PANEL_IN + _GAP_IN)
        boxes = ((_BOTTOM_IN + _STRIP_IN + _BETWEEN_IN, _PANEL_IN), (_BOTTOM_IN, _STRIP_IN))
        upper, strip = (
            figure.add_axes((left_in / width_in, low / height_in, _PANEL_IN / width_in, height / height_in))
            for low, height in boxes
        )
        _draw_diagonal(upper, panel, styles)
        _draw_errors(strip, panel, styles)
    if title:
        top = 1 - 0.18 / height_in
        figure.text(_LEFT_IN / width_in, top, title, fontsize=13, fontweight="bold", va="top", color=INK)
    figure.legend(
        handles=legend, title=note, loc="upper left", frameon=False, fontsize=8.5, title_fontsize=8.5,
        bbox_to_anchor=(1 - (legend_in + 0.15) / width_in, 1 - _TOP_IN / height_in), borderaxespad=0.0,
        alignment="left", labelspacing=0.55,
    )  # fmt: skip
    return figure


@dataclass(frozen=True)
class _Panel:
    """Points of one quantity, in the unit of the axes."""

    ids: tuple[str, ...]
    groups: npt.NDArray[np.str_]
    measured: Float
    predicted: Float
    low: Float
    high: Float
    label: str

    @property
    def error(self) -> Float:
        return np.asarray(self.predicted / self.measured - 1, np.float64)

    @property
    def limits(self) -> tuple[float, float]:
        """Of both axes: room for the numbers beside the outermost points; a single value still gets an axis."""
        low = float(min(self.measured.min(), self.predicted.min()))
        high = float(max(self.measured.max(), self.predicted.max()))
        margin = max(1.02, (high / low) ** 0.05)
        return low / margin, high * margin

    @property
    def worst(self) -> list[int]:
        """Indices of the points furthest off, worst first, by the ratio of prediction and measurement."""
        off = np.abs(np.log(self.predicted / self.measured))
        return [int(i) for i in np.argsort(-off, kind="stable")[:WORST] if off[i] > 0]

    @property
    def raster(self) -> bool:
        return len(self.ids) > _MAX_VECTORS


def _panels(points: Sequence[Point]) -> list[_Panel]:
    """Split by quantity, in order of first appearance."""
    by_quantity: dict[str, list[Point]] = {}
    for point in points:
        for what in ("measured", "predicted"):
            value = getattr(point, what)
            if not (np.isfinite(value) and value > 0):
                raise UsageError(
                    f"{point.id} has {what} {value!r} {point.unit}; a plot with log axes needs positive numbers"
                )
        by_quantity.setdefault("time" if point.unit in _SECONDS else point.unit, []).append(point)
    return [_panel(quantity, members) for quantity, members in by_quantity.items()]


def _panel(quantity: str, points: Sequence[Point]) -> _Panel:
    factor = np.array([_SECONDS[point.unit] if quantity == "time" else 1.0 for point in points])
    values = np.array([(p.measured, p.predicted, p.low, p.high) for p in points], np.float64) * factor[:, None]
    label = quantity
    if quantity == "time":
        middle = float(np.median(values[:, 0]))
        scale, label = next((entry for entry in _SHOWN if middle >= entry[0]), _SHOWN[-1])
        values /= scale
    measured, predicted, low, high = values.T
    groups = np.array([point.group for point in points])
    return _Panel(tuple(point.id for point in points), groups, measured, predicted, low, high, label)


def _draw_diagonal(ax: Axes, panel: _Panel, styles: dict[str, tuple[str, str]]) -> None:
    limits = np.array(panel.limits)
    for width, colour in BANDS:
        ax.fill_between(limits, limits * (1 - width), limits * (1 + width), color=colour, linewidth=0, zorder=0)
    ax.plot(limits, limits, color=FRAME, linewidth=1, zorder=1)
    ax.set(xscale="log", yscale="log", xlim=limits, ylim=limits)
    ticks = _ticks(float(limits[0]), float(limits[1]))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_major_formatter(NullFormatter())
    ax.set_ylabel(f"predicted ({panel.label})", fontsize=9.5)
    plain_frame(ax)
    _draw_points(ax, panel, panel.predicted, np.maximum(panel.low, limits[0]), panel.high, styles)
    _number_worst(ax, panel, panel.predicted)
    note = "bands: 5 % and 10 %\nbars: 90 % range"
    ax.text(0.02, 0.98, note, transform=ax.transAxes, ha="left", va="top", fontsize=7.5, color="#6b7280", zorder=5)


def _draw_errors(ax: Axes, panel: _Panel, styles: dict[str, tuple[str, str]]) -> None:
    ratio = panel.predicted / panel.measured
    span = max(np.log(1.15), 1.2 * float(np.abs(np.log(ratio)).max()))
    limits = panel.limits
    for width, colour in BANDS:
        ax.axhspan(1 - width, 1 + width, color=colour, linewidth=0, zorder=0)
    ax.axhline(1, color=FRAME, linewidth=1, zorder=1)
    ax.set(xscale="log", yscale="log", xlim=limits, ylim=(np.exp(-span), np.exp(span)))
    percents = _spaced([p for p in _PERCENT if abs(np.log1p(p / 100)) <= span], span)
    ax.yaxis.set_major_locator(FixedLocator([1 + p / 100 for p in percents]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _signed(value - 1, 0)))
    ax.xaxis.set_major_locator(FixedLocator(_ticks(*limits)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    ax.set_xlabel(f"measured ({panel.label})", fontsize=9.5)
    ax.set_ylabel("error", fontsize=9.5)
    plain_frame(ax)
    low = np.maximum(panel.low / panel.measured, np.exp(-2 * span))
    _draw_points(ax, panel, ratio, low, panel.high / panel.measured, styles)
    _number_worst(ax, panel, ratio)
    lines = [f"{n}  {_short(panel.ids[i])}  {_signed(panel.error[i], 1)}" for n, i in enumerate(panel.worst, start=1)]
    if lines:
        ax.annotate(
            "\n".join(["furthest off", *lines]), (0, 0), xycoords="axes fraction", xytext=(0, -40),
            textcoords="offset points", ha="left", va="top", fontsize=7.5, color=INK, annotation_clip=False,
        )  # fmt: skip


def _draw_points(
    ax: Axes, panel: _Panel, value: Float, low: Float, high: Float, styles: dict[str, tuple[str, str]]
) -> None:
    """Ranges below, markers above; a group at a time."""
    many = len(panel.ids) > 300
    for name, (colour, marker) in styles.items():
        at = panel.groups == name
        if not at.any():
            continue
        x = panel.measured[at]
        bars = np.stack([np.stack([x, low[at]], 1), np.stack([x, high[at]], 1)], 1)
        ranges = LineCollection(list(bars), colors=colour, linewidths=0.7, alpha=0.2 if many else 0.45, zorder=2)
        ranges.set_rasterized(panel.raster)
        ax.add_collection(ranges, autolim=False)
        (drawn,) = ax.plot(
            x, value[at], linestyle="none", marker=marker, markersize=3.2 if many else 4.6, color=colour,
            markeredgecolor="white", markeredgewidth=0.35, alpha=0.9, zorder=3,
        )  # fmt: skip
        drawn.set_rasterized(panel.raster)


def _number_worst(ax: Axes, panel: _Panel, value: Float) -> None:
    for number, i in enumerate(panel.worst, start=1):
        above = bool(panel.error[i] > 0)
        ax.annotate(
            str(number), (panel.measured[i], value[i]), xytext=(-4, 3) if above else (4, -3),
            textcoords="offset points", ha="right" if above else "left", va="bottom" if above else "top",
            fontsize=8, fontweight="bold", color=INK, zorder=5,
        )  # fmt: skip


def _legend(points: Sequence[Point], styles: dict[str, tuple[str, str]]) -> tuple[list[Line2D], str]:
    """An entry for each group, and the legend's title."""
    end = "\n" if len(styles) <= _MAX_TWO_LINES else ": "
    handles = []
    for name, (colour, marker) in list(styles.items())[:MAX_NAMED]:
        errors = [abs(p.predicted / p.measured - 1) for p in points if p.group == name]
        label = f"{name}{end}{len(errors)} points, mean |error| {100 * float(np.mean(errors)):.1f} %"
        handles.append(Line2D([], [], linestyle="none", marker=marker, markersize=6, color=colour, label=label))
    hidden = len(styles) - len(handles)
    return handles, f"first {MAX_NAMED} of {len(styles)} groups" if hidden else "group"


def _ticks(low: float, high: float) -> list[float]:
    """Round values on a log axis: powers of ten over many decades, 1-2-5 steps over few, even steps within one."""
    decades = np.log10(high / low)
    if decades < 0.75:
        rough = (high - low) / 6
        power = 10.0 ** np.floor(np.log10(rough))
        step = power * next(s for s in (1, 2, 5, 10) if s * power >= rough)
        count = np.arange(np.ceil(low / step), np.floor(high / step) + 1)
        return [float(f"{value:.12g}") for value in count * step]
    steps = (1, 2, 5) if decades < 3 else (1,)
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    return [value for p in powers for s in steps if low <= (value := float(f"{s}e{p}")) <= high]


def _spaced(percents: Sequence[int], span: float) -> list[int]:
    """Leave out ticks that would touch the one before, going outwards from 0."""
    kept = [0]
    for side in (1, -1):
        last = 0.0
        for percent in sorted((p for p in percents if p * side > 0), key=abs):
            place = abs(float(np.log1p(percent / 100)))
            if place - last >= 0.16 * span:
                kept.append(percent)
                last = place
    return sorted(kept)


def _short(name: str) -> str:
    return name if len(name) <= _MAX_ID else f"{name[: _MAX_ID // 2]} … {name[-_MAX_ID // 2 :]}"


def _signed(error: float, digits: int) -> str:
    text = f"{100 * error:+.{digits}f} %" if round(100 * error, digits) else f"{0:.{digits}f} %"
    return text.replace("-", "\N{MINUS SIGN}")
