"""Timelines as pictures: Gantt charts in PNG or SVG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from overlapsim.engine.timeline import Timeline
from overlapsim.errors import UsageError
from overlapsim.report.bars import LAUNCH, WAITING, Bar, Rows, family_names, most_sms, panel_rows
from overlapsim.report.figures import PNG_DPI, check_target, write_figure
from overlapsim.report.spans import horizon_ps, last_instant_ps
from overlapsim.report.window import cut
from overlapsim.units import PS_PER_S, format_time

Float = npt.NDArray[np.float64]

# Cool colours compute, warm ones move data; neighbours differ in lightness too, for grey prints and colour blindness.
_COMPUTE: Final = ("#2f6db5", "#2a9d8f", "#7b61a8", "#7fb2e5", "#4f7f3a", "#4a4e69", "#8fc1a9", "#b49fdc")
_COMMUNICATION: Final = ("#e07b28", "#b8332f", "#e9b949", "#c2608f", "#8c5a2b", "#f0a58f")
_HOST: Final = {"host": "#6b7280", LAUNCH: "#a8adb7"}
# (background, hatch colour, hatch)
_HATCHES: Final = {
    WAITING["wait SM"]: ("#f4f4f5", "#9a9aa2", "////"),
    WAITING["spin"]: ("#fdf1e3", "#c08a4e", "xxxx"),
    WAITING["wait host"]: ("#f4f4f5", "#9a9aa2", "...."),
}
_TIME_UNITS: Final = ((1e12, "s"), (1e9, "ms"), (1e6, "µs"), (1e3, "ns"), (1.0, "ps"))
_ALARM: Final = "#b8332f"
_WIDTH_IN, _RIGHT_IN = 12.0, 0.3
_LEGEND_COLUMNS: Final = 7
_LABEL_PT: Final = 8.0
_WHITE_HALO: Final = withStroke(linewidth=2.5, foreground="white")
_MAX_ROWS: Final = 40
_MAX_SVG_BARS: Final = 5000


def gantt(timelines: Mapping[str, Timeline], path: str | Path, *, title: str = "", until_ps: int | None = None) -> None:
    """Draw timelines below each other on one time axis and write a PNG or SVG file.

    One panel a timeline, one row a stream.  Where cohorts were recorded a
    kernel is drawn as its waves, as high as the SMs they run on, over a
    pale bar from its start to its end; a transfer as its chunks, with its
    tag written in.  Waiting for SMs and spinning on them are hatched.
    Each panel's end is written with three significant digits and, from
    the second panel on, the change against the first.

    Parameters
    ----------
    timelines : dict from name to Timeline
        In the order of panels, top first; the first is the one compared
        with, best the best serial variant.
    path : str or Path
        ``.png`` (150 dpi) or ``.svg``; written whole or not at all.  Above
        5000 bars the bars inside an SVG are an image, the rest stays vectors.
    title : str
        Above all panels.
    until_ps : int, optional
        Draw what starts before this instant only, and say so above the
        panels; what is cut off keeps its end, written at the right edge.

    Raises
    ------
    UsageError
        If there is no timeline, the suffix is another one, or `path` cannot
        be written.
    """
    check_target(path)
    if not timelines:
        raise UsageError("no timelines to draw; expected at least one")
    write_figure(gantt_figure(timelines, title=title, until_ps=until_ps), path)


def gantt_figure(timelines: Mapping[str, Timeline], *, title: str = "", until_ps: int | None = None) -> Figure:
    """Figure that :func:`gantt` writes; it belongs to no window and no pyplot state."""
    compute, communication = family_names(timelines)
    colours = dict(_HOST)
    colours |= {name: _COMPUTE[i % len(_COMPUTE)] for i, name in enumerate(compute)}
    colours |= {name: _COMMUNICATION[i % len(_COMMUNICATION)] for i, name in enumerate(communication)}
    sms = most_sms(timelines)
    panels = {name: panel_rows(timeline, sms, _MAX_ROWS) for name, timeline in timelines.items()}
    whole_ps = max(horizon_ps(timeline) for timeline in timelines.values())
    if until_ps is not None and until_ps < whole_ps:
        panels = {name: cut(panel, until_ps) for name, panel in panels.items()}
        part = f"the first {format_time(until_ps / PS_PER_S)} of {format_time(whole_ps / PS_PER_S)}"
        title = f"{title}: {part}" if title else part
    else:
        until_ps = None
    used = {bar.style for panel in panels.values() for bar in panel.bars}
    legend = _legend_handles(used, colours, [*compute, *communication])
    notes = _end_notes(timelines)
    scale = _scale(timelines, panels, notes, until_ps)
    figure, axes = _layout(panels, title, scale, num_legend_lines=-(-len(legend) // _LEGEND_COLUMNS))
    for ax, (name, panel) in zip(axes, panels.items(), strict=True):
        _draw_frame(ax, name, panel, scale)
        _draw_panel(ax, panel, colours, scale)
        _draw_end(ax, timelines[name], notes[name], scale, until_ps)
        ax.tick_params(axis="x", labelbottom=ax is axes[-1])
    axes[-1].set_xlabel(f"time ({scale.unit})", fontsize=9.5)
    if legend:
        figure.legend(
            handles=legend, loc="lower left", bbox_to_anchor=(scale.left_in / _WIDTH_IN, 0.0),
            ncols=_LEGEND_COLUMNS, frameon=False, fontsize=9, handlelength=1.6, handleheight=1.0,
            columnspacing=1.6, borderaxespad=0.6,
        )  # fmt: skip
    return figure


class _Scale(NamedTuple):
    """How picoseconds become inches, the same in all panels."""

    unit_ps: float
    unit: str
    left_in: float
    x_max: float
    raster: bool

    @property
    def width_in(self) -> float:
        """Width of the axes."""
        return _WIDTH_IN - self.left_in - _RIGHT_IN

    def points(self, duration: float | Float) -> float | Float:
        """Width on paper of a duration given in the axis unit."""
        return duration / self.x_max * self.width_in * 72


def _scale(
    timelines: Mapping[str, Timeline], panels: Mapping[str, Rows], notes: Mapping[str, str], until_ps: int | None
) -> _Scale:
    end_ps = until_ps or max(1, *(horizon_ps(timeline) for timeline in timelines.values()))
    unit_ps, unit = next((entry for entry in _TIME_UNITS if end_ps >= entry[0]), _TIME_UNITS[-1])
    longest = max((len(name) for panel in panels.values() for name in panel.names), default=0)
    left_in = 0.35 + 0.075 * max(8, longest)
    # Room on the right for the notes, wherever the latest end is.
    note_in = 0.25 + 0.09 * max(len(line) for note in notes.values() for line in note.split("\n"))
    width_in = _WIDTH_IN - left_in - _RIGHT_IN
    x_max = end_ps / unit_ps * width_in / (width_in - note_in)
    return _Scale(unit_ps, unit, left_in, x_max, sum(len(panel.bars) for panel in panels.values()) > _MAX_SVG_BARS)


def _end_notes(timelines: Mapping[str, Timeline]) -> dict[str, str]:
    """End of each timeline and, where both ended, its change against the first."""
    (first, reference), *_ = timelines.items()
    notes = {}
    for name, timeline in timelines.items():
        last = format_time(last_instant_ps(timeline) / PS_PER_S).replace("us", "µs")
        notes[name] = last if timeline.complete else f"deadlock\nat {last}"
        if name != first and timeline.complete and reference.complete and reference.end_ps:
            change = 100.0 * (timeline.end_ps / reference.end_ps - 1.0)
            text = f"{change:+.1f} %".replace("-", "\N{MINUS SIGN}")
            notes[name] += f"\n{text} vs {first if len(first) <= 16 else 'the first'}"
    return notes


def _layout(panels: Mapping[str, Rows], title: str, scale: _Scale, num_legend_lines: int) -> tuple[Figure, list[Axes]]:
    """A figure with one axes a panel, all as wide, each as high as its rows need."""
    rows = [max(1, len(panel.names)) for panel in panels.values()]
    row_in = 0.46 if max(rows) <= 12 else 0.3
    gap_in, top_in, bottom_in = 0.42, 0.42 + (0.38 if title else 0.0), 0.62 + 0.22 * num_legend_lines
    height_in = top_in + bottom_in + sum(rows) * row_in + gap_in * (len(rows) - 1)
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=PNG_DPI, facecolor="white")
    if title:
        left, top = scale.left_in / _WIDTH_IN, 1 - 0.16 / height_in
        figure.text(left, top, title, fontsize=13, fontweight="bold", va="top", ha="left")
    axes: list[Axes] = []
    top_edge_in = height_in - top_in
    for count in rows:
        bottom_in = top_edge_in - count * row_in
        box = (scale.left_in / _WIDTH_IN, bottom_in / height_in, scale.width_in / _WIDTH_IN, count * row_in / height_in)
        axes.append(figure.add_axes(box, sharex=axes[0] if axes else None))
        top_edge_in = bottom_in - gap_in
    return figure, axes


def _draw_frame(ax: Axes, name: str, panel: Rows, scale: _Scale) -> None:
    ax.set_title(name, loc="left", fontsize=10.5, fontweight="bold", pad=5)
    if panel.num_hidden:
        ax.set_title(f"{panel.num_hidden} more streams not drawn", loc="right", fontsize=8.5, color=_ALARM)
    ax.set_xlim(0, scale.x_max)
    ax.set_ylim(max(1, len(panel.names)), 0)
    ax.set_yticks(np.arange(len(panel.names)) + 0.5, panel.names, fontsize=9)
    ax.tick_params(axis="y", length=0, pad=6)
    ax.tick_params(axis="x", labelsize=8.5, color="#9a9aa2")
    ax.grid(axis="x", color="#e5e5ea", linewidth=0.7)
    ax.set_axisbelow(True)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color("#9a9aa2")
    for line in range(1, len(panel.names)):
        ax.axhline(line, color="#eeeef2", linewidth=0.7, zorder=0.5)


def _draw_panel(ax: Axes, panel: Rows, colours: Mapping[str, str], scale: _Scale) -> None:
    by_style: dict[tuple[bool, str], list[Bar]] = {}
    for bar in panel.bars:
        by_style.setdefault((bar.solid, bar.style), []).append(bar)
    for (solid, style), bars in sorted(by_style.items()):
        shapes = _shapes(style, solid, bars, colours, scale)
        shapes.set_zorder(3 if solid else 2)
        shapes.set_rasterized(scale.raster)
        ax.add_collection(shapes, autolim=False)
    for label in panel.labels:
        start, end = label.start_ps / scale.unit_ps, label.end_ps / scale.unit_ps
        for text in label.texts:
            # A character of this font is at most about 0.62 of its size wide.
            if len(text) * _LABEL_PT * 0.62 + 4 <= scale.points(end - start):
                written = ax.text((start + end) / 2, label.row + 0.5, text, fontsize=_LABEL_PT)
                written.set(ha="center", va="center", zorder=5, color="white" if label.running else "#1c1c22")
                halo = withStroke(linewidth=1.6, foreground="#00000088") if label.running else _WHITE_HALO
                written.set_path_effects([halo])
                break


def _shapes(style: str, solid: bool, bars: list[Bar], colours: Mapping[str, str], scale: _Scale) -> PolyCollection:
    values = np.array([bar[:5] for bar in bars], np.float64)
    left, right = values[:, 1] / scale.unit_ps, values[:, 2] / scale.unit_ps
    # Row 0 is on top and y runs downwards; a tenth of the row stays free above and below.
    low, high = values[:, 0] + 0.9 - 0.8 * values[:, 3], values[:, 0] + 0.9 - 0.8 * values[:, 4]
    corners = np.stack([np.stack([x, y], 1) for x, y in ((left, low), (left, high), (right, high), (right, low))], 1)
    if style in _HATCHES:
        face, edge, hatch = _HATCHES[style]
        return PolyCollection(list(corners), facecolor=face, edgecolor=edge, hatch=hatch, linewidth=0.0)
    if solid:
        # White seams between waves; without them where they would be all there is to see.
        seam = 0.5 if float(np.median(scale.points(right - left))) > 3 else 0.0
        return PolyCollection(list(corners), facecolor=colours[style], edgecolor="white", linewidth=seam)
    pale = tuple(1 - 0.22 * (1 - part) for part in to_rgb(colours[style]))
    return PolyCollection(list(corners), facecolor=pale, edgecolor="none")


def _draw_end(ax: Axes, timeline: Timeline, note: str, scale: _Scale, until_ps: int | None) -> None:
    end_ps = timeline.end_ps if timeline.complete else horizon_ps(timeline)
    colour = "#1c1c22" if timeline.complete else _ALARM
    if until_ps is not None and until_ps < end_ps:
        end, note = until_ps / scale.unit_ps, f"… {note}"
    else:
        end = end_ps / scale.unit_ps
        ax.axvline(end, color=colour, linewidth=1.1, linestyle="-" if timeline.complete else (0, (4, 3)), zorder=4)
    ax.annotate(
        note, (end, 0.5), xycoords=("data", "axes fraction"), xytext=(5, 0), textcoords="offset points",
        fontsize=9.5, fontweight="bold", color=colour, va="center", ha="left", annotation_clip=False,
    )  # fmt: skip


def _legend_handles(used: set[str], colours: Mapping[str, str], families: list[str]) -> list[Patch]:
    handles = [Patch(facecolor=colours[name], label=name) for name in [*families, *_HOST] if name in used]
    for style, (face, edge, hatch) in _HATCHES.items():
        if style in used:
            handles.append(Patch(facecolor=face, edgecolor=edge, hatch=hatch, linewidth=0.0, label=style))
    return handles
