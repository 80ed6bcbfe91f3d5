"""Plans one GEMM and its collective: asks every strategy, confirms in the engine, judges against the best serial."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from overlapsim.cost.base import Family
from overlapsim.cost.launch import launch_stack
from overlapsim.cost.prices import PriceBook
from overlapsim.cost.tiles import TileGrid
from overlapsim.engine import compiled
from overlapsim.engine.deadlock import raise_if_deadlocked
from overlapsim.engine.timeline import Timeline
from overlapsim.errors import PlanError, ProfileError, StrategyError, UsageError
from overlapsim.hardware.profile import Cluster
from overlapsim.plan import Cause, Finding, Prediction, Verdict
from overlapsim.planner.bounds import lower_bound_s
from overlapsim.planner.candidates import propose, refine
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import Program
from overlapsim.strategy.base import Applicability, Context, Parameters, Strategy
from overlapsim.strategy.tasks import Site
from overlapsim.units import format_time
from overlapsim.workload.operators import CollectiveOp, GemmOp, KernelOp

TIE_MARGIN: Final = 0.02
"""A gain below this is a tie: repeats of a case differ by 1 % on average, 4 % at most (SOURCES.md, FLASH)."""
FAMILIES: Final[tuple[Family, ...]] = ("gemm", "kernel", "collective", "launch")
KERNEL_FAMILIES: Final[tuple[Family, ...]] = ("attention", "memory")
NEARLY_FREE: Final = 1e-6
MAX_TILES: Final = 2**22
"""Tiles of one output that are simulated one by one: 131072 x 131072 in tiles of 64 x 64."""
LITTLE_TO_GAIN: Final = 1.05
"""Below this ceiling a gain that is not sure is no tie: it is not worth another kernel or stream."""


@dataclass(frozen=True)
class Effort:
    """How hard to look.

    Attributes
    ----------
    runs : candidates of one strategy that the engine runs, the best by recurrence or closed form first
    refinements : further runs around the best of them
    ranges : False leaves 90 % intervals out (low and high equal the value)
    """

    runs: int = 12
    refinements: int = 60
    ranges: bool = True


THOROUGH: Final = Effort()
QUICK: Final = Effort(runs=3, refinements=0, ranges=False)
"""For sweeps over many shapes."""


@dataclass(frozen=True)
class Candidate:
    """One strategy with parameters, priced and run.

    Attributes
    ----------
    screened_s : the recurrence's value, or None where the strategy has no closed form
    predicted_s : the engine's
    """

    strategy: Strategy
    parameters: Parameters
    predicted_s: float
    screened_s: float | None = None


@dataclass(frozen=True)
class StrategyResult:
    """What became of one strategy.

    Attributes
    ----------
    applicability : whether and why not
    best : the chosen parameters, None where the strategy does not apply
    prediction : time and 90 % interval
    speedup, speedup_low, speedup_high : best serial time over this one; the interval moves both together,
        since a slower GEMM slows serial execution too
    findings : what was believed and not measured
    """

    strategy: Strategy
    applicability: Applicability
    best: Candidate | None = None
    prediction: Prediction | None = None
    speedup: float = 0.0
    speedup_low: float = 0.0
    speedup_high: float = 0.0
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class OperatorResult:
    """The answer to `overlapsim operator`.

    Attributes
    ----------
    results : one per strategy asked, in order
    serial, best : the baseline, and what to run: the fastest strategy whose gain is sure where the verdict is overlap;
        where it is serial the baseline, or a strategy that is surely faster although nothing overlaps in it
    ceiling : serial time over the larger of compute and communication, with the best kernels and transports as priced
    cause : why overlap does not pay, "none" where it does
    """

    context: Context
    results: tuple[StrategyResult, ...]
    serial: StrategyResult
    best: StrategyResult
    lower_bound_s: float
    ceiling: float
    verdict: Verdict
    cause: Cause
    findings: tuple[Finding, ...]


def check_tiles(gemm: GemmOp, cluster: Cluster, tile: Sequence[int] | None = None) -> None:
    """Refuse an output of more tiles than are simulated.

    Parameters
    ----------
    tile : of the kernels; the smallest of the device's when None

    Raises
    ------
    UsageError
        If there are more than `MAX_TILES`.
    """
    smallest = min(cluster.device.kernels.gemm_tiles, key=lambda tile: tile[0] * tile[1])
    grid = TileGrid(gemm.m, gemm.n, *(tile or smallest)[:2])
    if grid.num_tiles > MAX_TILES:
        raise UsageError(
            f"an output of {gemm.m}x{gemm.n} has {grid.num_tiles} tiles of {grid.bm}x{grid.bn}; at most {MAX_TILES} "
            "are simulated: give a smaller output or a larger --tile"
        )


def build(strategy: Strategy, context: Context, parameters: Parameters) -> Program:
    """Rewrite the context's graph with `strategy` into a Program.

    Where the host's launches are charged (``prices.launch_s``) the graph is there twice, one behind the other: the host
    runs ahead of the second as far as it can.
    """
    builder = ProgramBuilder()
    strategy.check(parameters)
    launch_s = context.prices.launch_s
    site = Site(builder, context.prices, launch_s=launch_s)
    first = strategy.rewrite(context, parameters, site)
    if launch_s:
        second = strategy.rewrite(context, parameters, site)
        done = {task for tasks in first.exits.values() for task in tasks}
        for src, dst in itertools.product(
            sorted(done), sorted({t for tasks in second.entries.values() for t in tasks})
        ):
            builder.add_edge(src, dst)
    return builder.freeze()


def seconds_of(timeline: Timeline, context: Context) -> float:
    """Time of one execution in what `simulate` returned: the whole, or from the end of the first to that of the second.

    Parameters
    ----------
    timeline, context : as returned by and given to `simulate`
    """
    if not context.prices.launch_s:
        return timeline.duration_s
    first = timeline.t_end[: timeline.program.num_tasks // 2].max(initial=0)
    return float(timeline.end_ps - first) / 1e12


def simulate(
    strategy: Strategy, context: Context, parameters: Parameters, *, contention: bool = True, record: bool = False
) -> Timeline:
    """Build and run one choice.

    Raises
    ------
    DeadlockError
        If the strategy's tasks wait for each other.
    """
    timeline = compiled.run(build(strategy, context, parameters), contention=contention, record=record)
    raise_if_deadlocked(timeline)
    return timeline


def time_s(strategy: Strategy, context: Context, parameters: Parameters, *, contention: bool = True) -> float:
    """Seconds of one choice: `simulate` and `seconds_of`."""
    return seconds_of(simulate(strategy, context, parameters, contention=contention), context)


def plan_operator(
    context: Context,
    strategies: Sequence[Strategy],
    *,
    contention: bool = True,
    effort: Effort = THOROUGH,
) -> OperatorResult:
    """Choose how the GEMM and the collective of `context` overlap.

    Every strategy that applies proposes parameters; partitions of waves are
    solved exactly, the best candidates are run in the engine, and the
    fastest is compared with the best strategy that does not overlap.

    Parameters
    ----------
    context : a GEMM followed by a collective, and prices
    strategies : candidates; at least one must not overlap (the baseline)
    contention : False leaves HBM and link sharing out
    effort : how many candidates are run

    Raises
    ------
    PlanError
        If there is no baseline among the strategies that apply.
    """
    results = [_plan_strategy(strategy, context, contention, effort) for strategy in strategies]
    baselines = [r for r in results if r.best is not None and not r.strategy.overlaps]
    if not baselines:
        raise PlanError("no strategy without overlap applies; add `serial` to the strategies", exit_code=1)
    serial = min(baselines, key=_time)
    assert serial.best is not None
    shifts = _shifts(serial.best, context, contention) if effort.ranges else {}
    results = [_with_speedup(result, serial.best, shifts, context, contention) for result in results]
    serial = next(r for r in results if r.strategy is serial.strategy)
    bound = lower_bound_s(context.graph, context.prices.cluster)
    for result in results:
        if result.best is not None and result.best.predicted_s < bound * (1 - 1e-9):
            raise ProfileError(
                f"{result.strategy.name} is predicted at {format_time(result.best.predicted_s)}, below "
                f"{format_time(bound)} that {context.prices.cluster.name} can do: a measured curve or time does not "
                "belong to this machine; check it with `profiles check`"
            )
    ceiling = _time(serial) / max(compute_and_communication_s(context))
    overlapping = [r for r in results if r.strategy.overlaps]
    verdict, best = _judge(results, serial, ceiling, context)
    cause = _cause(verdict, ceiling, context, overlapping, contention, effort)
    # A kernel that was not measured, or pieces that are too small, can decide against a strategy.
    assumed = (f for r in results for f in r.findings if f.code in ("kernel_time_assumed", "few_tiles"))
    host = _host_bound(best, context) if effort.ranges else ()
    findings = dict.fromkeys((*context.prices.findings, *_shares(context), *assumed, *best.findings, *host))
    return OperatorResult(context, tuple(results), serial, best, bound, ceiling, verdict, cause, tuple(findings))


def _shares(context: Context) -> tuple[Finding, ...]:
    """Say where rows do not divide over ranks: libraries then need padding."""
    return tuple(
        Finding(
            "rows_do_not_divide",
            f"{gemm.m} rows do not divide over {op.ranks} ranks: {op.kind} needs padding, not charged",
        )
        for gemm in context.graph.of_type(GemmOp)
        for op in context.graph.of_type(CollectiveOp)
        if op.kind in ("reduce_scatter", "all_to_all") and gemm.m % op.ranks
    )


def _host_bound(best: StrategyResult, context: Context) -> tuple[Finding, ...]:
    """Say where launching the chosen strategy call by call would take longer than it runs, and is not charged."""
    assert best.best is not None
    if context.prices.stack is not None and context.prices.stack.host_s:
        return ()
    eager = launch_stack("eager", context.prices.cluster.device)
    charged = replace(context, prices=replace(context.prices, stack=eager))
    # The graph is there twice.
    host_s = int(build(best.strategy, charged, best.best.parameters).launch_ps.sum()) / 2e12
    if host_s <= best.best.predicted_s:
        return ()
    message = (
        f"{best.strategy.name} takes {format_time(best.best.predicted_s)} on the GPU and {format_time(host_s)} of an "
        "eager framework's host, which is not charged: as it is in a CUDA graph; ask with --stack eager otherwise"
    )
    return (Finding("host_not_charged", message),)


def _time(result: StrategyResult) -> float:
    assert result.best is not None
    return result.best.predicted_s


def _plan_strategy(strategy: Strategy, context: Context, contention: bool, effort: Effort) -> StrategyResult:
    applicability = strategy.applies_to(context)
    if not applicability.applies:
        return StrategyResult(strategy, applicability)

    def run_s(parameters: Parameters) -> float:
        return time_s(strategy, context, parameters, contention=contention)

    proposals = list(itertools.islice(propose(strategy.parameters(context)), effort.runs))
    if not proposals:
        raise StrategyError(f"{strategy.name} applies but proposes no parameters; its ParameterSpace is empty")
    # min takes the first of equals: the screen's order stands, fewest groups first.
    first, seconds = min(((p, run_s(p.parameters)) for p in proposals), key=lambda entry: entry[1])
    chosen, seconds = refine(first, seconds, run_s, effort.refinements)
    best = Candidate(strategy, chosen.parameters, seconds, chosen.screened_s)
    return StrategyResult(strategy, applicability, best, findings=strategy.findings(context, best.parameters))


Shifts = Mapping[tuple[Family, Literal["low", "high"]], float]


def _shifts(candidate: Candidate, context: Context, contention: bool) -> Shifts:
    """Time of one choice with one family at a time at its 5 % or 95 % value."""
    return {
        (family, end): time_s(
            candidate.strategy,
            replace(context, prices=context.prices.at(family, end)),
            candidate.parameters,
            contention=contention,
        )
        for family in (*FAMILIES, *(KERNEL_FAMILIES if any(context.graph.of_type(KernelOp)) else ()))
        for end in _ENDS
    }


def _with_speedup(
    result: StrategyResult, serial: Candidate, serial_shifts: Shifts, context: Context, contention: bool
) -> StrategyResult:
    """Add ranges: deviations of one family at a time, added in quadrature; a shift moves both times of a speed-up."""
    if result.best is None:
        return result
    time, base = result.best.predicted_s, serial.predicted_s
    shifts = {} if not serial_shifts else (
        serial_shifts if result.best is serial else _shifts(result.best, context, contention)
    )  # fmt: skip
    low = high = slow = fast = 0.0
    for key, t in shifts.items():
        low, high = low + min(0.0, t - time) ** 2, high + max(0.0, t - time) ** 2
        gain = serial_shifts[key] / t - base / time
        slow, fast = slow + min(0.0, gain) ** 2, fast + max(0.0, gain) ** 2
    return replace(
        result,
        prediction=Prediction(time, max(0.0, time - low**0.5), time + high**0.5),
        speedup=base / time,
        speedup_low=base / time - slow**0.5,
        speedup_high=base / time + fast**0.5,
    )


_ENDS: Final[tuple[Literal["low", "high"], ...]] = ("low", "high")


def compute_and_communication_s(context: Context) -> tuple[float, float]:
    """Times of both sides with the best kernels and transports as priced."""
    compute = sum(context.prices.best_gemm_s(op) for op in context.graph.of_type(GemmOp))
    compute += sum(context.prices.kernel(op).duration_s for op in context.graph.of_type(KernelOp))
    return compute, sum(context.prices.best_collective_s(op) for op in context.graph.of_type(CollectiveOp))


def _hides(result: StrategyResult, context: Context) -> bool:
    return result.best is not None and result.strategy.hides(context, result.best.parameters)


def _judge(
    results: Sequence[StrategyResult], serial: StrategyResult, ceiling: float, context: Context
) -> tuple[Verdict, StrategyResult]:
    """Return the verdict and what to run: a sure gain before a larger one that may be none.

    A sure gain by which nothing overlaps, such as a faster transport's, is serial execution by another strategy.
    """
    overlapping = sorted((r for r in results if r.strategy.overlaps and r.best is not None), key=_time)
    sure = [r for r in overlapping if r.speedup >= 1 + TIE_MARGIN and r.speedup_low > 1]
    if sure:
        return "overlap" if _hides(sure[0], context) else "serial", sure[0]
    # Where even perfect overlap gains little, a gain that is not sure is not worth another kernel or stream.
    if not overlapping or ceiling < LITTLE_TO_GAIN:
        return "serial", serial
    fastest = overlapping[0]
    if abs(fastest.speedup - 1) < TIE_MARGIN or fastest.speedup_low <= 1 <= fastest.speedup_high:
        return "tie", fastest if fastest.speedup > 1 else serial
    return "serial", serial


def _cause(
    verdict: Verdict,
    ceiling: float,
    context: Context,
    overlapping: Sequence[StrategyResult],
    contention: bool,
    effort: Effort,
) -> Cause:
    """Name what keeps overlap from paying: the first change that would make it pay."""
    if verdict == "overlap":
        return "none"
    serial_s = context.prices.serial_s(context.graph)
    refused = (r.applicability.cause for r in overlapping if r.applicability.cause != "none")
    # What gains without overlap says nothing of overlap.
    overlapping = [r for r in overlapping if r.best and (r.speedup <= 1 + TIE_MARGIN or _hides(r, context))]
    applying = [r.strategy for r in overlapping]
    if not applying:
        return next(refused, "none")
    compute, communication = compute_and_communication_s(context)
    # What is far smaller can be hidden, but that gains little: communication, or the compute to hide it under.
    little: Cause = "little_to_hide" if compute >= communication else "link_bound"
    if ceiling < 1 + TIE_MARGIN:
        return little

    brief = replace(effort, runs=min(effort.runs, 2), refinements=0)

    def pays(
        changed: PriceBook, strategies: Sequence[Strategy] = applying, *, with_contention: bool = contention
    ) -> bool:
        asked = replace(context, prices=changed)
        times = [_plan_strategy(s, asked, with_contention, brief).best for s in strategies]
        return any(c is not None and serial_s / c.predicted_s > 1 + TIE_MARGIN for c in times)

    prices = context.prices
    free = prices.scaled("collective", NEARLY_FREE)

    def slower_kernel(strategies: Sequence[Strategy]) -> bool:
        """Whether these would pay with the vendor's kernels: as it is, or if communication were free."""
        return pays(prices.with_vendor_kernels(), strategies) or (
            not pays(free, strategies) and pays(free.with_vendor_kernels(), strategies)
        )

    # A kernel that was measured speaks before what others might gain with kernels that were not.
    measured = [r.strategy for r in overlapping if r.strategy.name in prices.kernel_time_s]
    if measured and all(r.speedup < 1 for r in overlapping if r.strategy in measured) and slower_kernel(measured):
        return "kernel_slower"
    if verdict == "serial" and ceiling < LITTLE_TO_GAIN:
        return little
    if any(r.speedup > 1 + TIE_MARGIN for r in overlapping):
        return "none"
    if slower_kernel(applying):
        return "kernel_slower"
    if (contention and pays(prices, with_contention=False)) or pays(prices.with_comm_sms(1)):
        return "contention"
    if pays(prices.without_latency()):
        return "small_message"
    return "link_bound" if communication > 2 * compute else "few_tiles"
