"""Operator plans as runners need them: read, checked against themselves and the ranks at hand; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from overlapsim.cli.trace import planned_cluster
from overlapsim.errors import OverlapSimError, PlanError, ProfileError
from overlapsim.plan import Finding, OperatorPlan, read_plan
from overlapsim.planner.operator_plan import replay
from overlapsim.schedule.reorder import ReorderMap, SubtokenMap, from_settings
from overlapsim.strategy.registry import load_strategy
from overlapsim.units import dtype_bytes

TORCH_TYPES: Final[Mapping[str, str]] = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Name in torch of each type that runners take; tf32 is fp32 in memory."""
REORDERED: Final = ("wave_group",)
"""Strategies whose plan holds a reorder map."""


@dataclass(frozen=True)
class RunSpec:
    """What one operator plan asks runners to do.

    Attributes
    ----------
    strategy, parameters : as planned
    collective, ranks : the collective and its ranks
    m, n, k, dtype, accumulate : the GEMM on one rank; with all_gather m counts the gathered rows
    settings : neutral settings of the plan (docs/plan.md)
    reorder : the reorder map where the strategy has one
    rank_rows : rows of C on each rank
    independent_bytes : size of a collective that needs nothing of the GEMM, or None
    predicted_s, serial_s : the plan's predictions
    findings : what does not fit, but does not keep it from running
    """

    strategy: str
    parameters: Mapping[str, Any]
    collective: str
    ranks: int
    m: int
    n: int
    k: int
    dtype: str
    accumulate: str
    settings: Mapping[str, Any]
    reorder: ReorderMap | None = None
    rank_rows: tuple[int, ...] = ()
    independent_bytes: float | None = None
    predicted_s: float | None = None
    serial_s: float | None = None
    findings: tuple[Finding, ...] = ()

    def rows_of(self, rank: int) -> int:
        """Rows of C that a rank computes."""
        return self.rank_rows[rank] if self.rank_rows else self.m

    @property
    def gathers(self) -> bool:
        """Whether the GEMM's rows are gathered before it."""
        return self.collective == "all_gather" and self.independent_bytes is None

    @property
    def size_bytes(self) -> float:
        """Size of the collective as nccl-tests defines it."""
        if self.independent_bytes is not None:
            return self.independent_bytes
        columns = self.k if self.gathers else self.n
        return float(self.m * columns * dtype_bytes(self.dtype))


def read_spec(path: Path, *, ranks: int | None = None, cluster: str | None = None) -> RunSpec:
    """Read a plan file for running; everything that does not fit is one error.

    Parameters
    ----------
    path : plan file; side files lie beside it
    ranks : ranks at hand, None if they are not known yet
    cluster : profile to hold the plan against instead of the one it names

    Raises
    ------
    PlanError
        If the file is no plan, no runner takes its strategy or type, group tables or pieces do not cover the output,
        a side file is missing or another one, its settings were edited, or it is for other ranks.
    """
    plan = read_plan(path)
    if not isinstance(plan, OperatorPlan):
        raise PlanError(
            f"{path} is of kind {plan.kind}, a plan of a whole step; runners take one GEMM and its collective: write "
            "an operator plan with `operator --m M --n N --k K --collective KIND -o FILE`"
        )
    from overlapsim.validate.runners.catalogue import unapplied

    spec = spec_of(plan, path.parent)
    findings = _held_against_profile(plan, path.parent, cluster)
    if ranks is not None and ranks != spec.ranks:
        raise PlanError(
            f"{path} is a plan for {spec.ranks} ranks; {ranks} are here: start as many as planned "
            f"(torchrun --nproc-per-node, --nnodes), or plan again with --ranks {ranks}"
        )
    return replace(spec, findings=(*findings, *unapplied(spec)))


def spec_of(plan: OperatorPlan, folder: Path) -> RunSpec:
    """What a plan's own content says, checked without its profile.

    Raises
    ------
    PlanError
        As `read_spec`, ranks at hand and the profile apart.
    """
    from overlapsim.validate.runners.catalogue import check_settings

    if not plan.operators:
        raise PlanError("the plan has no operators; plan again with `operator -o`")
    if len(plan.operators) > 1:
        raise PlanError(f"the plan has {len(plan.operators)} operators; runners take one GEMM and its collective")
    chosen, asked = plan.operators[0], plan.inputs
    settings = chosen.settings
    for key, expected in (
        ("collective", asked.collective),
        ("ranks", asked.ranks),
        ("dtype", asked.dtype),
        ("accumulate", asked.accumulate),
    ):
        if settings.get(key, expected) != expected:
            raise PlanError(
                f"settings.{key} is {settings[key]!r} where the plan's inputs have {expected!r}; plan again instead of "
                "editing the file"
            )
    if asked.dtype not in TORCH_TYPES:
        raise PlanError(f"the plan's dtype is {asked.dtype}; runners take {', '.join(TORCH_TYPES)}")
    reorder = from_settings(settings, folder) if chosen.strategy in REORDERED else None
    prediction = plan.predictions.get(chosen.strategy)
    spec = RunSpec(
        strategy=chosen.strategy,
        parameters=chosen.parameters,
        collective=asked.collective,
        ranks=asked.ranks,
        m=asked.m,
        n=asked.n,
        k=asked.k,
        dtype=asked.dtype,
        accumulate=asked.accumulate,
        settings=settings,
        reorder=reorder,
        rank_rows=asked.rank_rows,
        independent_bytes=asked.independent_bytes,
        predicted_s=None if prediction is None else prediction.value_s,
        serial_s=plan.choice.serial_s,
    )
    check_settings(spec, [other.strategy for other in plan.alternatives if other.applies])
    # Runners go by settings; parameters of another type would pass unseen.
    load_strategy(chosen.strategy).check(chosen.parameters)
    return spec


def check_map(spec: RunSpec) -> None:
    """Whether a reorder map is of this output.

    Raises
    ------
    PlanError
        If its rows, columns or ranks are not those of the GEMM.
    """
    reorder = spec.reorder
    assert reorder is not None
    if isinstance(reorder, SubtokenMap):
        rows = [source.rows for source in reorder.sources]
        expected = list(spec.rank_rows) or [spec.m] * spec.ranks
        if rows != expected or reorder.n != spec.n:
            raise PlanError(
                f"the plan's map is of {rows} rows by rank and {reorder.n} columns; its GEMM has {expected} and "
                f"{spec.n}: plan again"
            )
        return
    grid = reorder.grid
    ranks = getattr(reorder, "ranks", spec.ranks)
    if (grid.m, grid.n, ranks) != (spec.m, spec.n, spec.ranks):
        raise PlanError(
            f"the plan's map is of {grid.m}x{grid.n} on {ranks} ranks; its GEMM gives {spec.m}x{spec.n} on "
            f"{spec.ranks}: plan again"
        )


def _held_against_profile(plan: OperatorPlan, folder: Path, cluster: str | None) -> tuple[Finding, ...]:
    """Findings of comparing the plan with what its strategy gives for its inputs on its profile."""
    try:
        machine = planned_cluster(cluster or plan.inputs.cluster, folder)
    except ProfileError as error:
        text = f"the plan's profile cannot be loaded, so that its settings were not derived again: {error}"
        return (Finding("profile_missing", text),)
    try:
        return replay(plan, machine).findings
    except PlanError:
        raise
    except OverlapSimError as error:
        raise PlanError(f"the plan does not fit {machine.name}: {error}") from error
