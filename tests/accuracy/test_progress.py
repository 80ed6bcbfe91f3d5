"""Progress of suites: told where someone listens, at most every so often, and never in the way."""

from __future__ import annotations

from overlapsim.accuracy.progress import counted, progress_to
from overlapsim.accuracy.strategies import evaluate

ROW = (
    "id,value,unit\n"
    "flux-a800|cluster=a800-sxm8|collective=all_gather|m=4096|n=6144|k=12288|ranks=8|strategy=fused_tiles|"
    "kernel_ms=2.378|tile=128x256x32|comm_rows=512|metric=exposed,0.091,ms\n"
)


def test_nobody_listens() -> None:
    assert list(counted("rows", iter("ab"))) == ["a", "b"]


def test_lines_are_kept_apart() -> None:
    told: list[str] = []
    with progress_to(told.append, every_s=3600.0):
        assert list(counted("rows", range(1000))) == list(range(1000))
    assert told == []


def test_a_suite_tells_how_far_it_is(tmp_path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text(ROW)
    told: list[str] = []
    with progress_to(told.append, every_s=0.0):
        evaluate(table)
    assert told == ["published figures: 1 of 1"]
