"""Writes figures as PNG or SVG: equal figures give equal files, whole or not at all."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from overlapsim.errors import UsageError
from overlapsim.report.files import check_writable, write_bytes

PNG_DPI: Final = 150
# Neighbours differ in lightness too, for grey prints and colour blindness.
COLOURS: Final = ("#2f6db5", "#e07b28", "#2a9d8f", "#b8332f", "#7b61a8", "#e9b949", "#4f7f3a", "#c2608f", "#4a4e69")
INK: Final = "#1c1c22"
FRAME: Final = "#9a9aa2"
GRID: Final = "#e5e5ea"


def check_target(path: str | Path) -> str:
    """Check that a picture can be written to `path`, before any work.

    Returns
    -------
    str
        ``png`` or ``svg``.

    Raises
    ------
    UsageError
        If the suffix is another one, or `path` cannot be written.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg"):
        raise UsageError(f"cannot draw {path}: its suffix is {suffix or 'missing'!r}; expected .png or .svg")
    check_writable(path)
    return suffix[1:]


def write_figure(figure: Figure, path: str | Path) -> None:
    """Write `figure` as PNG (150 dpi) or SVG (text stays text), by suffix.

    Raises
    ------
    UsageError
        As :func:`check_target`.
    """
    kind = check_target(path)
    buffer = io.BytesIO()
    # A fixed salt and no date: equal figures give equal files.
    metadata = {"Software": None} if kind == "png" else {"Date": None}
    with mpl.rc_context({"svg.hashsalt": "overlapsim", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=kind, metadata=metadata, dpi=PNG_DPI)
    write_bytes(path, buffer.getvalue())


def plain_frame(ax: Axes) -> None:
    """Give `ax` the look of all our pictures: two spines, a pale grid behind the data, small ticks."""
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(FRAME)
    ax.grid(color=GRID, linewidth=0.7)
    ax.set_axisbelow(True)
    ax.tick_params(which="major", labelsize=8.5, color=FRAME)
    ax.tick_params(which="minor", length=0)
