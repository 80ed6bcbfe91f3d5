"""Predicted against measured times as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from overlapsim.calibration.compare import Comparison
from overlapsim.report.figures import COLOURS, FRAME, check_target, write_figure

_MARKERS: Final = "osD^vPX*<>"
_MAX_NAMED: Final = 18


def compare_plot(comparison: Comparison, path: str | Path) -> None:
    """Draw predicted over measured against measured, one marker a record, and write a PNG or SVG file.

    The band is 10 % either way; what ran beside something else is drawn hollow, against its price alone.

    Raises
    ------
    UsageError
        If the suffix is another one, or `path` cannot be written.
    """
    check_target(path)
    write_figure(compare_figure(comparison), path)


def compare_figure(comparison: Comparison) -> Figure:
    """As `compare_plot`, the figure itself."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.add_subplot()
    names = list(dict.fromkeys(row.group for row in comparison.rows))
    for place, name in enumerate(names):
        rows = [row for row in comparison.rows if row.group == name]
        measured = np.array([row.record.median_s for row in rows])
        predicted = np.array([row.predicted_s for row in rows])
        colour = COLOURS[place % len(COLOURS)]
        axes.plot(
            measured * 1e6,
            predicted / measured,
            linestyle="none",
            marker=_MARKERS[place % len(_MARKERS)],
            markersize=4.5,
            color=colour,
            markerfacecolor=colour if rows[0].record.alone else "none",
            alpha=0.8,
            label=name if place < _MAX_NAMED else None,
        )
    axes.axhspan(0.9, 1.1, color="#e8eef5", zorder=0)
    axes.axhline(1.0, color=FRAME, linewidth=1, zorder=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = [tick for tick in (0.1, 0.2, 0.5, 0.7, 0.9, 1.0, 1.1, 1.5, 2.0, 5.0, 10.0) if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("measured time, µs")
    axes.set_ylabel("predicted / measured")
    axes.set_title(f"{comparison.cluster}: {len(comparison.rows)} measurements")
    more = f" (first {_MAX_NAMED} of {len(names)} groups named)" if len(names) > _MAX_NAMED else ""
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False, title=more or None)
    return figure
