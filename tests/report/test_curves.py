"""Latency against number of groups: solved, run, drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from overlapsim.cost.prices import PriceBook
from overlapsim.errors import StrategyError, UsageError
from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.operator import plan_operator, simulate
from overlapsim.report.curves import GroupPoint, Mark, groups_figure, groups_plot, latency_by_groups
from overlapsim.strategy.base import Context
from overlapsim.strategy.registry import load_strategies, load_strategy
from overlapsim.workload.operators import GemmOp, gemm_and_collective


def context(m: int = 4096, tile: tuple[int, ...] | None = (256, 128)) -> Context:
    gemm = GemmOp(m, 8192, 4096, "fp16", "fp16")
    prices = PriceBook(load_cluster("a800-sxm8"), 2, gemm=gemm, kind="all_reduce", tile=tile)
    return Context(gemm_and_collective(gemm, "all_reduce", 2), prices)


WAVE_GROUP = load_strategy("wave_group")


def test_every_number_of_groups_once_and_as_the_engine_runs_it() -> None:
    here = context()
    points = latency_by_groups(here, WAVE_GROUP, max_groups=5)
    assert [point.num_groups for point in points] == [1, 2, 3, 4, 5]
    for point in points:
        assert len(point.parameters["group_tiles"]) == point.num_groups
        assert sum(point.parameters["group_tiles"]) == 1024
        assert point.engine_s == simulate(WAVE_GROUP, here, point.parameters).duration_s
        assert 0 < point.recurrence_low_s <= point.recurrence_high_s


def test_one_group_is_the_kernel_and_then_the_collective() -> None:
    here = context()
    gemm, collective = here.pair().gemm, here.pair().collective
    kernel = here.prices.kernel_gemm(gemm, "wave_group", (256, 128)).duration_s
    first = latency_by_groups(here, WAVE_GROUP, max_groups=1)[0]
    alone = kernel + here.prices.collective(collective).duration_s + here.prices.signal_wait_s
    assert first.recurrence_low_s == pytest.approx(alone, rel=1e-9)
    assert first.engine_s == pytest.approx(alone, rel=1e-6)


def test_the_planners_choice_is_on_the_curve() -> None:
    here = context(m=8192)
    entry = next(r for r in plan_operator(here, load_strategies()).results if r.strategy is WAVE_GROUP)
    assert entry.best is not None
    points = latency_by_groups(here, WAVE_GROUP, like=entry.best.parameters)
    by_count = {point.num_groups: point.engine_s for point in points}
    chosen = len(entry.best.parameters["group_tiles"])
    assert by_count[chosen] <= entry.best.predicted_s
    # It need not be the lowest point for every shape, but here nothing the planner did not try is much faster.
    assert min(by_count.values()) >= 0.99 * entry.best.predicted_s


def test_more_groups_never_worsen_the_best_recurrence_of_at_most_as_many() -> None:
    values = [point.recurrence_low_s for point in latency_by_groups(context(m=8192), WAVE_GROUP)]
    best = np.minimum.accumulate(values)
    assert best[-1] < values[0], "signalling must gain something here"
    assert min(values) == pytest.approx(best[-1])


def test_like_keeps_the_other_parameters() -> None:
    here = context(tile=None)
    tiles = here.prices.kernel_tiles(here.pair().gemm, "wave_group")
    assert len(tiles) > 1
    for tile in tiles[:2]:
        points = latency_by_groups(here, WAVE_GROUP, like={"tile": tile, "sms": "steal"}, max_groups=2)
        assert {point.parameters["tile"] for point in points} == {tile}


def test_without_contention_the_engine_is_not_slower() -> None:
    here = context(m=8192)
    for shared, free in zip(
        latency_by_groups(here, WAVE_GROUP, max_groups=4),
        latency_by_groups(here, WAVE_GROUP, max_groups=4, contention=False),
        strict=True,
    ):
        assert free.engine_s <= shared.engine_s * (1 + 1e-9)


def test_what_has_no_groups_is_refused() -> None:
    with pytest.raises(StrategyError, match="no waves to split"):
        latency_by_groups(context(), load_strategy("serial"))
    with pytest.raises(StrategyError, match="one wave"):
        latency_by_groups(context(m=256), WAVE_GROUP)
    with pytest.raises(StrategyError, match="no waves to split"):
        latency_by_groups(context(), WAVE_GROUP, like={"tile": (64, 64, 64)})
    with pytest.raises(StrategyError, match="max_groups"):
        latency_by_groups(context(), WAVE_GROUP, max_groups=0)


POINTS = tuple(
    GroupPoint(count, {"group_tiles": (8,) * count}, low, low * 1.02, engine)
    for count, low, engine in ((1, 3.4e-3, 3.41e-3), (2, 3.0e-3, 2.95e-3), (3, 2.9e-3, 2.97e-3))
)


def texts_of(points: tuple[GroupPoint, ...], **options: object) -> list[str]:
    (ax,) = groups_figure(points, **options).axes  # type: ignore[arg-type]
    return [text.get_text() for text in ax.texts]


def test_serial_others_and_best_are_named_with_their_change() -> None:
    texts = texts_of(POINTS, serial_s=3.1e-3, others=[Mark("chunked in 4", 2.8e-3)])
    minus = "\N{MINUS SIGN}"
    assert texts == [
        "serial: 3.10 ms",
        f"chunked in 4: 2.80 ms ({minus}9.7 %)",
        f"best: 2.95 ms ({minus}4.8 %)\n2 groups of 8, 8 tiles",
    ]


def test_curves_hold_the_values() -> None:
    (ax,) = groups_figure(POINTS, serial_s=3.1e-3, title="a shape").axes
    by_label = {line.get_label(): line for line in ax.lines}
    assert list(by_label["engine"].get_ydata()) == pytest.approx([3.41, 2.95, 2.97])
    assert list(by_label["recurrence, lowest"].get_ydata()) == pytest.approx([3.4, 3.0, 2.9])
    assert list(by_label["engine"].get_xdata()) == [1, 2, 3]
    low, high = ax.get_ylim()
    assert low < 2.9
    assert high > 3.4 * 1.02
    assert ax.get_title(loc="left") == "a shape"
    assert ax.get_ylabel() == "latency (ms)"


def test_one_belief_has_no_band_and_one_point_is_enough() -> None:
    alone = replace(POINTS[0], recurrence_high_s=POINTS[0].recurrence_low_s, engine_s=40e-6)
    figure = groups_figure((alone,), serial_s=39e-6)
    (ax,) = figure.axes
    assert not ax.collections
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["recurrence", "engine"]
    assert ax.texts[-1].get_text() == "best: 40.0 µs (+2.6 %)\n1 group"


def test_files(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        groups_plot(POINTS, tmp_path / name, serial_s=3.1e-3)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize(
    ("points", "serial_s", "name", "message"),
    [
        ((), 1e-3, "a.png", "no points"),
        (POINTS, 0.0, "a.png", "time of serial is 0.0"),
        (POINTS, float("nan"), "a.png", "time of serial is nan"),
        (POINTS, 1e-3, "a.txt", r"\.png or \.svg"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    tmp_path: Path, points: tuple[GroupPoint, ...], serial_s: float, name: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        groups_plot(points, tmp_path / name, serial_s=serial_s)
    assert list(tmp_path.iterdir()) == []
