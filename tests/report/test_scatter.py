"""Predicted against measured: what is drawn where, what is named, what is refused."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from overlapsim.accuracy.suite import Row
from overlapsim.errors import UsageError
from overlapsim.report.scatter import MAX_NAMED, _ticks, accuracy_figure, accuracy_plot


def row(name: str, group: str = "wave_group", measured: float = 2e-3, error: float = 0.02, unit: str = "s") -> Row:
    predicted = measured * (1 + error)
    return Row(name, group, measured, predicted, 0.9 * predicted, 1.1 * predicted, unit, False)


ROWS = (
    row("exact", measured=1e-3, error=0.0),
    row("high", measured=2e-3, error=0.12),
    row("low", measured=4e-3, error=-0.2),
    row("other", "chunked", 8e-3, 0.03),
)


def drawn(ax: Axes) -> dict[str, np.ndarray]:
    """Points of each series of markers, by colour."""
    return {
        str(line.get_color()): np.column_stack([line.get_xdata(), line.get_ydata()])
        for line in ax.lines
        if line.get_marker() not in (None, "None", "")
    }


def texts_of(path: Path) -> list[str]:
    return ["".join(node.itertext()) for node in ET.fromstring(path.read_text()).iter() if node.tag.endswith("text")]


def test_files_by_suffix_and_the_same_bytes_again(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.png", "b.png", "a.svg", "b.svg")]
    for path in paths:
        accuracy_plot(ROWS, path, title="accuracy of demo")
    assert paths[0].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[2].read_bytes() == paths[3].read_bytes()
    texts = texts_of(paths[2])
    assert {"accuracy of demo", "measured (ms)", "predicted (ms)", "error", "wave_group"} <= set(texts)
    assert "3 points, mean |error| 10.7 %" in texts
    assert "1 points, mean |error| 3.0 %" in texts


def test_points_lie_where_they_were_measured() -> None:
    upper, strip = accuracy_figure(ROWS).axes
    first, second = drawn(upper).values()
    assert first == pytest.approx(np.array([[1, 1], [2, 2.24], [4, 3.2]]))
    assert second == pytest.approx(np.array([[8, 8.24]]))
    errors, _ = drawn(strip).values()
    assert errors == pytest.approx(np.array([[1, 1], [2, 1.12], [4, 0.8]]))
    assert upper.get_xlim() == upper.get_ylim() == strip.get_xlim()
    assert upper.get_xscale() == upper.get_yscale() == strip.get_xscale() == "log"
    assert list(upper.get_xticks()) == list(upper.get_yticks()) == list(strip.get_xticks())


def test_ranges_are_bars_from_low_to_high() -> None:
    upper, _ = accuracy_figure(ROWS).axes
    bars = [bar for part in upper.collections if isinstance(part, LineCollection) for bar in part.get_segments()]
    expected = [[(r.measured * 1e3, r.low * 1e3), (r.measured * 1e3, r.high * 1e3)] for r in ROWS]
    assert np.array(bars) == pytest.approx(np.array(expected))


def test_bands_are_five_and_ten_percent() -> None:
    upper, strip = accuracy_figure(ROWS).axes
    low, high = upper.get_xlim()
    edges = []
    for part in upper.collections:
        if not isinstance(part, LineCollection):
            (path,) = part.get_paths()
            edges.append(sorted({round(float(y / x), 6) for x, y in path.vertices if low <= x <= high}))
    assert edges == [[0.9, 1.1], [0.95, 1.05]]
    assert sorted(round(float(patch.get_y()), 6) for patch in strip.patches) == [0.9, 0.95]


def test_the_worst_are_numbered_and_named_in_order() -> None:
    upper, strip = accuracy_figure(ROWS).axes
    (listed,) = [text.get_text() for text in strip.texts if "furthest off" in text.get_text()]
    minus = "\N{MINUS SIGN}"
    assert listed.split("\n") == ["furthest off", f"1  low  {minus}20.0 %", "2  high  +12.0 %", "3  other  +3.0 %"]
    for ax, value in ((upper, 3.2), (strip, 0.8)):
        (one,) = [text for text in ax.texts if text.get_text() == "1"]
        assert one.xy == pytest.approx((4, value))  # type: ignore[attr-defined]


def test_times_share_a_panel_and_other_units_have_their_own() -> None:
    rows = [row("a", measured=2.0, unit="ms"), row("b", measured=3e-3), row("c", measured=1.2, unit="ratio")]
    rows.append(row("d", measured=900.0, unit="us"))
    figure = accuracy_figure(rows)
    assert [ax.get_xlabel() for ax in figure.axes] == ["", "measured (ms)", "", "measured (ratio)"]
    (times,) = drawn(figure.axes[0]).values()
    assert times[:, 0] == pytest.approx([2.0, 3.0, 0.9])
    (ratios,) = drawn(figure.axes[2]).values()
    assert ratios[:, 0] == pytest.approx([1.2])


def test_a_single_exact_point_has_axes_and_names_nobody() -> None:
    upper, strip = accuracy_figure([row("only", error=0.0)]).axes
    assert upper.get_xlim()[0] < 2 < upper.get_xlim()[1]
    assert not any("furthest" in text.get_text() for text in strip.texts)
    assert strip.get_ylim()[0] < 0.9
    assert strip.get_ylim()[1] > 1.1


def test_many_groups_name_the_first() -> None:
    rows = [row(f"r{i}", f"group {i}", 1e-3 * (i + 1)) for i in range(MAX_NAMED + 6)]
    figure = accuracy_figure(rows)
    (legend,) = figure.legends
    assert len(legend.get_texts()) == MAX_NAMED
    assert legend.get_title().get_text() == f"first {MAX_NAMED} of {MAX_NAMED + 6} groups"
    marks = {(line.get_color(), line.get_marker()) for line in figure.axes[0].lines if line.get_linestyle() == "None"}
    assert len(marks) == len(rows), "two groups look the same"


@pytest.mark.parametrize(("groups", "name"), [(2, "wave_group"), (30, "aic_h100_sxm_attention_prefill_bf16 fitted")])
def test_texts_stay_inside_the_figure(groups: int, name: str) -> None:
    rows = [row("attention|batch=2|" * 8 + str(i), f"{name} {i}", 1e-3 * (i + 1), 0.1 + i / 100) for i in range(groups)]
    figure = accuracy_figure(rows, title="accuracy of flashoverlap")
    figure.draw_without_rendering()
    (legend,) = figure.legends
    width, height = figure.get_size_inches() * figure.dpi
    upper, strip = figure.axes
    for artist in (legend, *figure.texts, *upper.texts, *strip.texts):
        box = artist.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= width
        assert box.y0 >= 0
        assert box.y1 <= height
    assert legend.get_window_extent().x0 > upper.get_window_extent().x1
    (listed,) = [text for text in strip.texts if "furthest off" in text.get_text()]
    assert listed.get_window_extent().x1 <= upper.get_window_extent().x1 + 0.3 * figure.dpi
    assert listed.get_window_extent().y1 < strip.xaxis.label.get_window_extent().y0


@given(low=st.floats(1e-9, 1e9), span=st.floats(1.03, 1e7))
def test_ticks_are_few_and_inside(low: float, span: float) -> None:
    ticks = _ticks(low, low * span)
    assert 2 <= len(ticks) <= 11
    assert all(low <= tick <= low * span for tick in ticks)
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize(
    ("rows", "name", "message"),
    [
        ((), "a.png", "no points"),
        ((row("bad", error=-1.0),), "a.png", "bad has predicted"),
        ((row("bad", measured=float("nan")),), "a.png", "bad has measured nan"),
        (ROWS, "a.pdf", r"\.png or \.svg"),
        (ROWS, "missing/a.png", "does not exist"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path: Path, rows: tuple[Row, ...], name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        accuracy_plot(rows, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
