"""Between a plan file and the planner: inputs -> context, result -> plan, plan -> the same simulation again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from overlapsim.cost.prices import PriceBook
from overlapsim.errors import PlanError, UsageError
from overlapsim.hardware.profile import Cluster, CurveTable, Source
from overlapsim.plan import (
    Alternative,
    Choice,
    CurveInput,
    Finding,
    OperatorInputs,
    OperatorSettings,
    Plan,
)
from overlapsim.planner.operator import OperatorResult, StrategyResult
from overlapsim.strategy.base import Context, Parameters, Strategy
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.operators import COLLECTIVES, GemmOp, gemm_then_collective


def context_from(inputs: OperatorInputs, cluster: Cluster) -> Context:
    """Build the planner's question from what was asked and the cluster it names.

    Raises
    ------
    UsageError
        If the ranks do not fit the cluster or a measured time is not positive.
    WorkloadError
        If a size, type or collective is invalid.
    """
    machine = cluster.with_nodes(inputs.nodes)
    if not 2 <= inputs.ranks <= machine.num_devices:
        raise UsageError(
            f"--ranks is {inputs.ranks}; {machine.name} with --nodes {inputs.nodes} has {machine.num_devices} GPUs, "
            f"expected 2 to {machine.num_devices}"
        )
    kind = next((kind for kind in COLLECTIVES if kind == inputs.collective), None)
    if kind is None:
        raise UsageError(f"collective {inputs.collective!r} is unknown; expected one of {', '.join(COLLECTIVES)}")
    gemm = GemmOp(inputs.m, inputs.n, inputs.k, inputs.dtype, inputs.accumulate)
    prices = PriceBook(
        machine,
        inputs.ranks,
        gemm=gemm,
        kind=kind,
        gemm_time_s=inputs.gemm_time_s,
        kernel_time_s=inputs.kernel_time_s,
        curve=_table(inputs.curve),
        tile=inputs.tile,
        collective_sms=inputs.comm_sms,
    )
    return Context(gemm_then_collective(gemm, kind, inputs.ranks, inputs.rank_rows), prices)


def to_plan(result: OperatorResult, inputs: OperatorInputs, provenance: Mapping[str, str]) -> Plan:
    """Write down a result: the choice, what kernels need, predictions with ranges, what was not chosen."""
    best = result.best
    assert best.best is not None
    gemm, _ = result.context.gemm_and_collective()
    return Plan(
        kind="operator",
        inputs=inputs,
        choice=Choice(
            strategy=best.strategy.name,
            verdict=result.verdict,
            cause=result.cause,
            serial_s=_seconds(result.serial),
            ceiling=result.ceiling,
            lower_bound_s=result.lower_bound_s,
        ),
        operators=(
            OperatorSettings(
                operator=gemm.name,
                pass_=gemm.pass_,
                strategy=best.strategy.name,
                parameters=best.best.parameters,
                settings=best.strategy.settings(result.context, best.best.parameters),
            ),
        ),
        predictions={r.strategy.name: r.prediction for r in result.results if r.prediction is not None},
        findings=result.findings,
        alternatives=tuple(_alternative(r) for r in result.results if r is not best),
        provenance=provenance,
    )


@dataclass(frozen=True)
class Replay:
    """What a plan says to run: the same strategy, context and parameters."""

    strategy: Strategy
    context: Context
    parameters: Parameters
    findings: tuple[Finding, ...]


def replay(plan: Plan, cluster: Cluster) -> Replay:
    """Prepare the simulation of a plan that was read back.

    A cluster profile that changed since the plan was made is a finding, not
    an error: the numbers may then differ.

    Raises
    ------
    PlanError
        If the plan has no operator.
    """
    if not plan.operators:
        raise PlanError("the plan has no operators; plan again with `operator -o`")
    chosen = plan.operators[0]
    findings: tuple[Finding, ...] = ()
    if plan.inputs.cluster_sha256 != cluster.digest:
        findings = (
            Finding(
                "cluster_changed", f"the profile {cluster.name} is not the one this plan was made with; plan again"
            ),
        )
    return Replay(load_strategy(chosen.strategy), context_from(plan.inputs, cluster), chosen.parameters, findings)


def _table(curve: CurveInput | None) -> CurveTable | None:
    if curve is None:
        return None
    return CurveTable(curve.size_bytes, curve.time_s, Source("override", curve.file))


def _alternative(result: StrategyResult) -> Alternative:
    return Alternative(
        strategy=result.strategy.name,
        applies=result.applicability.applies,
        reasons=result.applicability.reasons,
        prediction=result.prediction,
        parameters={} if result.best is None else result.best.parameters,
    )


def _seconds(result: StrategyResult) -> float:
    assert result.prediction is not None
    return result.prediction.value_s
