"""The part of a long timeline that is drawn."""

from __future__ import annotations

import pytest

from overlapsim.engine.reference import run
from overlapsim.engine.timeline import Timeline
from overlapsim.report.bars import panel_rows
from overlapsim.report.plots import gantt_figure
from overlapsim.report.window import cut, first_part_ps
from overlapsim.schedule.builder import ProgramBuilder

TASK_PS = 100


def pipeline(tasks: int, late: int = 3) -> Timeline:
    """Two GPUs with a row of equal tasks each; the second starts `late` tasks after the first."""
    b = ProgramBuilder()
    pools = [b.add_pool(num_sms=1, device=device, name="sms") for device in (0, 1)]
    streams = [b.add_stream(name=f"compute {device}") for device in (0, 1)]
    ids = [
        [b.add_blocks(stream=stream, pool=pool, units=1, unit_ps=TASK_PS, sm=1, op="forward") for _ in range(tasks)]
        for stream, pool in zip(streams, pools, strict=True)
    ]
    b.add_edge(ids[0][late - 1], ids[1][0])
    return run(b.freeze())


def test_a_short_timeline_is_drawn_whole() -> None:
    timeline = pipeline(10)
    assert first_part_ps(timeline, most=10) is None
    assert [text.get_text() for text in gantt_figure({"plan": timeline}, title="step").texts] == ["step"]


@pytest.mark.parametrize(("late", "until"), [(3, 10 * TASK_PS), (20, 30 * TASK_PS)])
def test_a_long_one_until_rows_are_full_or_the_fill_is_over(late: int, until: int) -> None:
    assert first_part_ps(pipeline(100, late), most=10) == until


def test_what_is_cut_is_said_and_nothing_reaches_beyond() -> None:
    timeline = pipeline(100)
    panel = cut(panel_rows(timeline, {}, 40), 1050)
    assert max(bar.end_ps for bar in panel.bars) == 1050
    figure = gantt_figure({"plan": timeline}, title="step", until_ps=1050)
    assert figure.texts[0].get_text().startswith("step: the first 1.05 ns of 10.3 ns")
    assert any("…" in text.get_text() for text in figure.axes[0].texts)
