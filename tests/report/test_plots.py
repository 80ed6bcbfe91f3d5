"""Gantt charts."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from overlapsim.engine.reference import run
from overlapsim.engine.timeline import Cohorts
from overlapsim.errors import UsageError
from overlapsim.report.bars import family, family_names, most_sms, panel_rows
from overlapsim.report.plots import gantt, gantt_figure
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import HOST
from overlapsim.testing.programs import random_program
from tests.report import samples

PNG = b"\x89PNG\r\n\x1a\n"


def texts_of(path: Path) -> list[str]:
    return ["".join(node.itertext()) for node in ET.fromstring(path.read_text()).iter() if node.tag.endswith("text")]


def legend_of(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_png_and_svg_by_suffix(tmp_path: Path) -> None:
    timelines = {"serial": run(samples.signal(), record=True)}
    gantt(timelines, tmp_path / "a.png")
    gantt(timelines, tmp_path / "a.SVG", title="one GEMM")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.SVG", "a.png"]
    assert {"one GEMM", "serial", "compute", "comm", "360 ps", "time (ps)"} <= set(texts_of(tmp_path / "a.SVG"))


def test_labels_legend_and_change_against_the_first() -> None:
    timelines = {"serial": run(samples.signal(), record=True), "stolen": run(samples.steal(), record=True)}
    figure = gantt_figure(timelines)
    first, second = ([text.get_text() for text in ax.texts] for ax in figure.axes)
    # The second group's bar has room for its number only.
    assert first == ["mlp.fc2 fwd gemm", "mlp.fc2 group 1/2", "group 2/2", "360 ps"]
    assert second == ["mlp.fc1", "mlp.fc1 all_reduce", "320 ps\n\N{MINUS SIGN}11.1 % vs serial"]
    assert legend_of(figure) == ["mlp", "mlp comm", "launch", "waiting for SMs"]


def test_a_deadlock_is_named_and_waiters_are_labelled() -> None:
    figure = gantt_figure({"opposite order": run(samples.deadlock())})
    assert [text.get_text() for text in figure.axes[0].texts] == [
        "grad b0",
        "grad b1",
        "grad b1",
        "grad b0",
        "deadlock\nat 0 ps",
    ]
    assert legend_of(figure) == ["waiting for SMs", "spinning on SMs"]


def test_refusals_write_nothing(tmp_path: Path) -> None:
    timelines = {"serial": run(samples.steal())}
    for name in ("a.pdf", "a"):
        with pytest.raises(UsageError, match=r"expected \.png or \.svg"):
            gantt(timelines, tmp_path / name)
    with pytest.raises(UsageError, match="no timelines"):
        gantt({}, tmp_path / "a.png")
    with pytest.raises(UsageError, match="does not exist"):
        gantt(timelines, tmp_path / "missing" / "a.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_equal_timelines_give_equal_files(tmp_path: Path, suffix: str) -> None:
    for name in ("one", "two"):
        gantt({"a": run(random_program(5), record=True)}, tmp_path / f"{name}.{suffix}")
    assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()


def test_no_window_and_no_global_figures() -> None:
    code = "import sys, overlapsim.report.plots; print('matplotlib.pyplot' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_panels_share_time_and_grow_with_rows() -> None:
    small = gantt_figure({"a": run(samples.signal())})
    large = gantt_figure({"a": run(samples.signal()), "b": run(samples.skew())})
    assert len(small.axes) == 1
    assert large.axes[0].get_shared_x_axes().joined(*large.axes)
    assert large.get_figheight() > small.get_figheight()
    assert [text.get_text() for text in large.axes[1].get_yticklabels()] == [
        "GPU 0  stream 0",
        "GPU 0  stream 1",
        "GPU 0  stream 3",
        "GPU 1  stream 2",
    ]


def test_an_empty_program_is_an_empty_picture(tmp_path: Path) -> None:
    gantt({"nothing": run(ProgramBuilder().freeze())}, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_many_streams_are_cut_and_the_cut_is_said(tmp_path: Path) -> None:
    b = ProgramBuilder()
    for device in range(50):
        b.add_blocks(stream=b.add_stream(), pool=b.add_pool(1, device=device), units=1, unit_ps=10, sm=1)
    gantt({"wide": run(b.freeze())}, tmp_path / "a.svg")
    assert "10 more streams not drawn" in texts_of(tmp_path / "a.svg")


def test_bars_of_waves_are_as_high_as_their_sms() -> None:
    timelines = {"stolen": run(samples.steal(), record=True)}
    rows = panel_rows(timelines["stolen"], most_sms(timelines), max_rows=9)
    assert rows.names == ["compute", "comm", "host lane 0"]
    waves = [(b.start_ps, b.end_ps, b.bottom, b.top) for b in rows.bars if b.style == "mlp" and b.solid]
    assert waves == [(0, 100, 0.0, 1.0), (100, 200, 0.0, 0.5), (200, 300, 0.0, 0.5), (220, 320, 0.5, 1.0)]
    assert [(b.start_ps, b.end_ps) for b in rows.bars if b.style == "waiting for SMs"] == [(50, 100)]


def test_without_cohorts_a_kernel_is_one_bar() -> None:
    timelines = {"stolen": run(samples.steal())}
    rows = panel_rows(timelines["stolen"], most_sms(timelines), max_rows=9)
    assert [(b.start_ps, b.end_ps, b.top) for b in rows.bars if b.style == "mlp" and b.solid] == [(0, 320, 1.0)]


def test_a_wave_between_others_is_cut_in_two() -> None:
    b = ProgramBuilder()
    b.add_blocks(stream=b.add_stream(), pool=b.add_pool(num_sms=4), units=7, unit_ps=10, sm=4)
    columns = np.array([(0, 0, 10, 2), (0, 0, 20, 1), (0, 0, 10, 1), (0, 10, 30, 3)], np.int64).T
    timeline = replace(samples.timeline_of(b.freeze(), [(0, 0, 0, 0, 30)]), cohorts=Cohorts(*columns))
    rows = panel_rows(timeline, most_sms({"a": timeline}), max_rows=9)
    late = [(bar.bottom, bar.top) for bar in rows.bars if bar.solid and bar.start_ps == 10]
    assert late == [(0.0, 0.5), (0.75, 1.0)]


@pytest.mark.parametrize("seed", range(30))
def test_solid_bars_never_cover_each_other_and_hold_all_work(seed: int) -> None:
    timeline = run(random_program(seed), record=True)
    program, cohorts = timeline.program, timeline.cohorts
    assert cohorts is not None
    scale = most_sms({"a": timeline})
    rows = panel_rows(timeline, scale, max_rows=1000)
    solid = [b for b in rows.bars if b.solid and b.row < sum(not name.startswith("host") for name in rows.names)]
    for i, one in enumerate(solid):
        assert 0.0 <= one.bottom < one.top <= 1.0
        for two in solid[:i]:
            if one.row == two.row and one.start_ps < two.end_ps and two.start_ps < one.end_ps:
                assert one.bottom >= two.top or two.bottom >= one.top
    blocks = cohorts.units[(program.kind[cohorts.task] == 0)]
    area = sum((b.top - b.bottom) * scale[rows.names[b.row]] for b in solid if b.style == "compute")
    assert area == pytest.approx(float(blocks.sum()))


def test_families() -> None:
    program = samples.host_lane()
    assert family(program, int((program.kind == HOST).argmax())) == "host"
    assert family_names({"a": run(samples.signal()), "b": run(samples.late_worker())}) == (
        ["compute", "mlp"],
        ["communication", "mlp comm"],
    )
