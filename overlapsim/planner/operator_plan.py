"""Between a plan file and the planner: inputs -> context, result -> plan, plan -> the same simulation again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from overlapsim.cost.beliefs import check_curve
from overlapsim.cost.launch import launch_stack
from overlapsim.cost.prices import PriceBook
from overlapsim.errors import PlanError, UsageError
from overlapsim.hardware.profile import Cluster, CurveTable, Source
from overlapsim.plan import (
    Alternative,
    Choice,
    CurveInput,
    Finding,
    OperatorInputs,
    OperatorPlan,
    OperatorSettings,
)
from overlapsim.planner.operator import OperatorResult, StrategyResult, check_tiles
from overlapsim.strategy.base import Context, Parameters, Strategy
from overlapsim.strategy.registry import load_strategy, strategy_names
from overlapsim.units import format_time
from overlapsim.workload.operators import COLLECTIVES, GemmOp, gemm_and_collective, independent_pair

SAME_TIME: Final = 1e-9
"""Relative difference up to which a plan's prediction and its simulation are the same number."""


MAX_RANKS: Final = 16384
"""Ranks of one collective that are priced link by link."""


def context_from(inputs: OperatorInputs, cluster: Cluster) -> Context:
    """Build the planner's question from what was asked and the cluster it names.

    Raises
    ------
    UsageError
        If the ranks do not fit the cluster or a measured time is not positive.
    WorkloadError
        If a size, type or collective is invalid.
    """
    if inputs.nodes < 1:
        raise UsageError(f"--nodes is {inputs.nodes}; expected at least 1")
    num_devices = inputs.nodes * cluster.node.num_devices
    if not 2 <= inputs.ranks <= min(num_devices, MAX_RANKS):
        raise UsageError(
            f"--ranks is {inputs.ranks}; {cluster.name} with --nodes {inputs.nodes} has {num_devices} GPUs, "
            f"expected 2 to {min(num_devices, MAX_RANKS)}"
        )
    # Ranks fill one node after another; nodes beyond theirs change nothing.
    machine = cluster.with_nodes(-(-inputs.ranks // cluster.node.num_devices))
    kind = next((kind for kind in COLLECTIVES if kind == inputs.collective), None)
    if kind is None:
        raise UsageError(f"collective {inputs.collective!r} is unknown; expected one of {', '.join(COLLECTIVES)}")
    gemm = GemmOp(inputs.m, inputs.n, inputs.k, inputs.dtype, inputs.accumulate)
    check_tiles(gemm, machine, inputs.tile)
    curve = _table(inputs.curve)
    if curve is not None:
        check_curve(machine, kind, inputs.ranks, curve)
    prices = PriceBook(
        machine,
        inputs.ranks,
        gemm=gemm,
        kind=kind,
        gemm_time_s=inputs.gemm_time_s,
        kernel_time_s=inputs.kernel_time_s,
        curve=curve,
        tile=inputs.tile,
        collective_sms=inputs.comm_sms,
        stack=launch_stack(inputs.stack, machine.device),
    )
    if inputs.independent_bytes is None:
        return Context(gemm_and_collective(gemm, kind, inputs.ranks, inputs.rank_rows), prices)
    if inputs.rank_rows:
        raise UsageError("--rank-rows is for the collective on the GEMM's output; an independent one has a size")
    return Context(independent_pair(gemm, kind, inputs.ranks, inputs.independent_bytes), prices)


def to_plan(result: OperatorResult, inputs: OperatorInputs, provenance: Mapping[str, str]) -> OperatorPlan:
    """Write down a result: the choice, what kernels need, predictions with ranges, what was not chosen."""
    best = result.best
    assert best.best is not None
    gemm = result.context.pair().gemm
    return OperatorPlan(
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
    """What a plan says to run: the same strategy, context and parameters.

    Attributes
    ----------
    planned_s : the plan's prediction of the chosen strategy
    serial : the best strategy without overlap and its parameters, as planned
    findings : what does not fit the plan
    """

    strategy: Strategy
    context: Context
    parameters: Parameters
    planned_s: float
    serial: tuple[Strategy, Parameters]
    findings: tuple[Finding, ...]

    def differences(self, simulated_s: float) -> tuple[Finding, ...]:
        """Finding ``plan_differs`` where the simulation does not give the time that the plan predicts."""
        return time_differs(self.strategy.name, simulated_s, self.planned_s)


def time_differs(what: str, simulated_s: float, planned_s: float) -> tuple[Finding, ...]:
    """Finding ``plan_differs`` where a simulation does not give the time that its plan predicts."""
    if abs(simulated_s - planned_s) <= SAME_TIME * abs(planned_s):
        return ()
    message = (
        f"{what} takes {format_time(simulated_s)} where the plan says {format_time(planned_s)}: its inputs or the "
        "profile were edited since; plan again"
    )
    return (Finding("plan_differs", message),)


def cluster_differs(planned_sha256: str, cluster: Cluster) -> tuple[Finding, ...]:
    """Finding ``cluster_changed`` where a profile is not the one a plan was made with."""
    if planned_sha256 == cluster.digest:
        return ()
    message = f"the profile {cluster.name} is not the one this plan was made with; plan again"
    return (Finding("cluster_changed", message),)


def replay(plan: OperatorPlan, cluster: Cluster) -> Replay:
    """Prepare the simulation of a plan that was read back.

    A cluster profile that changed since the plan was made is a finding, not
    an error: the numbers may then differ.  What kernels would be given must
    be what the strategy gives for the plan's inputs and parameters.

    Raises
    ------
    PlanError
        If the plan has no operator or lacks predictions, its parameters cannot be used, or its settings do not
        follow from its inputs and parameters.
    StrategyError, WorkloadError, UsageError
        If inputs or parameters are outside what is accepted.
    """
    if not plan.operators:
        raise PlanError("the plan has no operators; plan again with `operator -o`")
    chosen = plan.operators[0]
    findings = cluster_differs(plan.inputs.cluster_sha256, cluster)
    strategy, context = load_strategy(chosen.strategy), context_from(plan.inputs, cluster)
    if strategy.name not in plan.predictions:
        raise PlanError(f"the plan has no prediction for {strategy.name}, which it chose; plan again")
    try:
        settings = strategy.settings(context, chosen.parameters)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"the plan's parameters of {strategy.name} cannot be used ({type(error).__name__}: {error}); plan again"
        ) from error
    check_settings(strategy.name, chosen.settings, settings)
    return Replay(
        strategy, context, chosen.parameters, plan.predictions[strategy.name].value_s, _serial(plan), findings
    )


def check_settings(name: str, given: Mapping[str, Any], expected: Mapping[str, Any], prefix: str = "") -> None:
    """Compare what the plan tells kernels with what follows from its parameters, key by key."""
    given, expected = _plain(given), _plain(expected)
    for key in dict.fromkeys((*expected, *given)):
        left, right = given.get(key, _ABSENT), expected.get(key, _ABSENT)
        if isinstance(left, dict) and isinstance(right, dict):
            check_settings(name, left, right, f"{prefix}{key}.")
        elif left != right or isinstance(left, bool) != isinstance(right, bool):
            raise PlanError(
                f"settings.{prefix}{key} is {_short(left)}; {name} with this plan's inputs and parameters needs "
                f"{_short(right)}; plan again instead of editing the file"
            )


_ABSENT: Final = "absent"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As they are read back from a file: no tuples."""
    content: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings))
    return content


def _serial(plan: OperatorPlan) -> tuple[Strategy, Parameters]:
    """The fastest strategy without overlap that the plan holds."""
    parameters = {entry.strategy: entry.parameters for entry in plan.alternatives}
    parameters |= {entry.strategy: entry.parameters for entry in plan.operators}
    # A strategy that was considered elsewhere need not be installed here.
    names = [name for name in strategy_names() if name in plan.predictions and name in parameters]
    baselines = [strategy for strategy in map(load_strategy, names) if not strategy.overlaps]
    if not baselines:
        raise PlanError("the plan has no prediction without overlap to compare with; plan again")
    serial = min(baselines, key=lambda strategy: plan.predictions[strategy.name].value_s)
    return serial, parameters[serial.name]


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
