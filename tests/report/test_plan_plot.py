"""Ranked plans as a picture: one bar a plan that ends at its time, its range, and the plan without strategies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.container import BarContainer, ErrorbarContainer

from overlapsim.errors import UsageError
from overlapsim.plan import Prediction, StepPlan
from overlapsim.report.plan_plot import plan_figure, plan_plot
from tests.test_plan import BEST, STEP

PARTS = {"gemm": 0.1, "attention": 0.05, "other_compute": 0.02, "exposed_ep": 0.1, "bubble": 0.03}


def plan() -> StepPlan:
    best = replace(BEST, step=Prediction(0.3, 0.25, 0.4), breakdown_s=PARTS)
    return replace(STEP, choice=best, alternatives=(replace(best, rank=2),), serial=replace(best, rank=0))


def test_bars_end_at_the_step_and_ranges_around_it() -> None:
    (axes,) = plan_figure(plan()).axes
    bars = [container for container in axes.containers if isinstance(container, BarContainer)]
    assert len(bars) == 5
    for row in range(3):
        ends = [bar.patches[row].get_x() + bar.patches[row].get_width() for bar in bars]
        assert max(ends) == pytest.approx(0.3)
        assert ends == sorted(ends)
    ranges = [container for container in axes.containers if isinstance(container, ErrorbarContainer)]
    assert len(ranges) == 3
    assert [label.get_text()[:2] for label in axes.get_yticklabels()] == ["1:", "2:", "no"]


def test_a_plan_without_strategies_that_is_ranked_is_drawn_once() -> None:
    ranked = plan()
    (axes,) = plan_figure(replace(ranked, serial=ranked.alternatives[0])).axes
    assert len(axes.get_yticklabels()) == 2


def test_equal_plans_give_equal_files(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "a.svg", "b.svg"):
        plan_plot(plan(), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    with pytest.raises(UsageError, match=r"\.pdf"):
        plan_plot(plan(), tmp_path / "a.pdf")
