"""Plan files as `operator -o` writes them, with a strategy chosen that need not be the fastest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import OperatorInputs, dump_plan
from overlapsim.planner.operator import QUICK, plan_operator
from overlapsim.planner.operator_plan import context_from, to_plan
from overlapsim.report.files import write_text
from overlapsim.schedule.reorder import planned_map, write_side_file
from overlapsim.strategy.registry import load_strategies

CLUSTER = "cpu-gloo8"
"""Has fp32, which runs on CPU tensors; whatever it prices, plans have the form of any other machine's."""


def write_plan(
    path: Path,
    strategy: str,
    collective: str,
    *,
    ranks: int,
    m: int = 300,
    n: int = 200,
    k: int = 96,
    tile: tuple[int, ...] | None = (64, 64),
    independent_bytes: float | None = None,
    rank_rows: tuple[int, ...] = (),
    cluster: str = CLUSTER,
    dtype: str = "fp32",
) -> Path:
    """Plan one shape and write the strategy's choice, map files included."""
    machine = load_cluster(cluster)
    inputs = OperatorInputs(
        cluster=cluster,
        cluster_sha256=machine.digest,
        nodes=1,
        ranks=ranks,
        m=m,
        n=n,
        k=k,
        dtype=dtype,
        accumulate="fp32",
        collective=collective,
        tile=tile,
        independent_bytes=independent_bytes,
        rank_rows=rank_rows,
    )
    strategies = load_strategies(dict.fromkeys(("serial", strategy)))
    result = plan_operator(context_from(inputs, machine), strategies, effort=QUICK)
    chosen = next(entry for entry in result.results if entry.strategy.name == strategy)
    assert chosen.best is not None, chosen.applicability.reasons
    plan = to_plan(replace(result, best=chosen), inputs, {"overlapsim": "test"})
    for settings in (operator.settings for operator in plan.operators):
        if "file" in settings.get("map", {}):
            write_side_file(planned_map(settings), path.parent)
    write_text(path, dump_plan(plan))
    return path
