"""Plans of every strategy on real ranks over gloo: what comes out is held against float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.validate.plan_files import write_plan
from tests.validate.torchrun import script


def plans(folder: Path, ranks: int) -> int:
    """Write a ragged plan of every strategy; returns how many."""
    folder.mkdir()
    for strategy, collective in (
        ("serial", "all_to_all"),
        ("chunked", "all_reduce"),
        ("chunked", "all_gather"),
        ("wave_group", "all_reduce"),
        ("wave_group", "reduce_scatter"),
        ("wave_group", "all_to_all"),
        ("ring_exchange", "all_gather"),
        ("ring_exchange", "reduce_scatter"),
        ("pipelined_rs", "reduce_scatter"),
        ("async_tp", "all_gather"),
        ("async_tp", "reduce_scatter"),
    ):
        write_plan(folder / f"{strategy}-{collective}.yaml", strategy, collective, ranks=ranks, m=301, n=203, k=70)
    for collective in ("all_gather", "reduce_scatter"):
        path = folder / f"bulk-{collective}.yaml"
        write_plan(path, "bulk", collective, ranks=ranks, independent_bytes=123456.0)
    rows = (301, 41, 160, 7)[:ranks]
    write_plan(folder / "wave_group-uneven.yaml", "wave_group", "all_to_all", ranks=ranks, m=301, rank_rows=rows)
    return len(list(folder.glob("*.yaml")))


def test_two_ranks(tmp_path: Path) -> None:
    count = plans(tmp_path / "plans", 2)
    outcome = script("numerics", str(tmp_path / "plans"), ranks=2)
    assert outcome.codes == (0,), outcome.err
    lines = [line for line in outcome.out.splitlines() if line.startswith("ok ")]
    assert len(lines) == count + 11, outcome.out
    assert all(line.endswith("1 nodes") for line in lines)


def test_four_ranks_on_two_pretend_nodes(tmp_path: Path) -> None:
    count = plans(tmp_path / "plans", 4)
    outcome = script("numerics", str(tmp_path / "plans"), ranks=4, nodes=2)
    assert outcome.codes == (0, 0), outcome.err
    lines = [line for line in outcome.out.splitlines() if line.startswith("ok ")]
    assert len(lines) == count + 11, outcome.out
    assert all(line.endswith("2 nodes") for line in lines)


@pytest.mark.slow
def test_kernels_in_the_interpreter_on_two_ranks(tmp_path: Path) -> None:
    """The path that a GPU takes: Triton kernels store, count and restore, the library moves the groups."""
    pytest.importorskip("triton")
    folder = tmp_path / "plans"
    folder.mkdir()
    for collective in ("all_reduce", "reduce_scatter", "all_to_all"):
        path = folder / f"wave_group-{collective}.yaml"
        write_plan(path, "wave_group", collective, ranks=2, m=70, n=50, k=40, tile=(32, 32, 32))
    write_plan(
        folder / "fused.yaml", "fused_tiles", "all_gather", ranks=2, m=64, n=48, k=32, tile=(16, 16, 32),
        cluster="h100-sxm8", dtype="fp16",
    )  # fmt: skip
    outcome = script("numerics", str(folder), "plans", ranks=2, TRITON_INTERPRET="1")
    assert outcome.codes == (0,), outcome.err
    assert outcome.out.count("ok ") == 4, outcome.out
