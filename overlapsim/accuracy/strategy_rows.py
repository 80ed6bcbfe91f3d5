"""Rows of the suite ``strategies``: one overlapped operator each, described by its id, and its prediction."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from overlapsim.accuracy.value_file import SCALE, Figure, number, parse_figures
from overlapsim.cost.launch import launch_stack
from overlapsim.cost.prices import PriceBook
from overlapsim.errors import CalibrationError, OverlapSimError
from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import Finding
from overlapsim.planner.candidates import propose
from overlapsim.planner.operator import FAMILIES
from overlapsim.step.blocks import simulate_piece
from overlapsim.strategy.base import Context, Parameters, Strategy
from overlapsim.strategy.compose import Chosen, Composition
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.operators import CollectiveKind, GemmOp, gemm_and_collective

NEEDED: Final = ("cluster", "collective", "m", "n", "k", "ranks", "strategy", "metric")
SIZES: Final = ("m", "n", "k")
OPTIONAL: Final = ("dtype", "accumulate", "gemm_ms", "kernel_ms", "comm_ms", "stack")
METRICS: Final[Mapping[str, tuple[str, ...]]] = {
    "total": ("s", "ms", "us"),
    "exposed": ("s", "ms", "us"),
    "share": ("%", "ratio"),
    "efficiency": ("%", "ratio"),
    "speedup": ("ratio",),
}
"""Metrics and the units they come in."""
RUNS: Final = 12


@dataclass(frozen=True)
class StrategyRow:
    """One published figure.

    Attributes
    ----------
    id : ``group|key=value|...``
    keys : of `NEEDED` and `OPTIONAL`, as text
    fixed : values per parameter of the strategy that the figure is known to have been measured with
    """

    id: str
    group: str
    keys: Mapping[str, str]
    fixed: Mapping[str, tuple[Any, ...]]
    value: float
    unit: str

    def seconds(self, key: str) -> float | None:
        """A measured time of the id; None where it is not given."""
        return float(self.keys[key]) * 1e-3 if key in self.keys else None


def parse_rows(text: str, name: str) -> tuple[StrategyRow, ...]:
    """Rows of a CSV with the header ``id,value,unit``.

    Raises
    ------
    CalibrationError
        Naming the line and what is wrong with it.

    Notes
    -----
    A published mean over several shapes has ``m``, ``n`` and ``k`` with as many values each, joined by ``+``.
    """
    return tuple(_row(figure) for figure in parse_figures(text, name, blank=False))


def _row(figure: Figure) -> StrategyRow:
    where, entries = figure.where, figure.keys
    if not all(key in entries for key in NEEDED):
        raise CalibrationError(
            f"{where}: id is {figure.id!r}; expected group|key=value|... with each of {', '.join(NEEDED)} once"
        )
    metric = figure.metric
    if figure.unit not in METRICS.get(metric, ()):
        known = "; ".join(f"{name} in {' '.join(units)}" for name, units in METRICS.items())
        raise CalibrationError(f"{where}: metric {metric!r} in {figure.unit!r}; expected one of: {known}")
    if metric == "efficiency" and not {"gemm_ms", "comm_ms"} <= entries.keys():
        raise CalibrationError(f"{where}: efficiency needs the measured gemm_ms and comm_ms")
    if entries["collective"] not in get_args(CollectiveKind):
        raise CalibrationError(f"{where}: collective {entries['collective']!r} is unknown")
    sizes = {key: _whole(entries[key], where, key) for key in (*SIZES, "ranks")}
    if len({len(sizes[key]) for key in SIZES}) > 1 or len(sizes["ranks"]) > 1:
        raise CalibrationError(f"{where}: m, n and k are {sizes}; expected as many of each, and one number of ranks")
    if len(sizes["m"]) > 1 and not entries.keys().isdisjoint(("gemm_ms", "kernel_ms", "comm_ms")):
        raise CalibrationError(f"{where}: a measured time belongs to one shape, not to {len(sizes['m'])}")
    for key in ("gemm_ms", "kernel_ms", "comm_ms"):
        if key in entries:
            number(entries[key], where, key)
    keys: dict[str, str] = {key: entries[key] for key in (*NEEDED, *OPTIONAL) if key in entries}
    fixed = {key: _values(text) for key, text in entries.items() if key not in keys}
    return StrategyRow(figure.id, figure.group, keys, fixed, figure.value, figure.unit)


def _whole(text: str, where: str, key: str) -> tuple[int, ...]:
    numbers = [number(part, where, key) for part in text.split("+")]
    if any(one != int(one) for one in numbers):
        raise CalibrationError(f"{where}: {key} is {text!r}; expected whole numbers")
    return tuple(map(int, numbers))


def _values(text: str) -> tuple[Any, ...]:
    """Values of a parameter, several with ``+`` between: whole numbers, true, false, tiles such as 128x256x64, words.

    Examples
    --------
    >>> _values("128x256x64+64x64x32"), _values("512"), _values("stores")
    (((128, 256, 64), (64, 64, 32)), (512,), ('stores',))
    """
    return tuple(_value(part) for part in text.split("+"))


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text.isdecimal():
        return int(text)
    sizes = text.split("x")
    return tuple(int(size) for size in sizes) if len(sizes) > 1 and all(s.isdecimal() for s in sizes) else text


@dataclass(frozen=True)
class Outcome:
    """Prediction of one row, in its unit; `total` is the overlapped time and `baseline` the one in series, seconds.

    Of a row with several shapes all are means, and the parameters those of the first.
    """

    value: float
    low: float
    high: float
    total: float
    baseline: float
    parameters: Parameters
    findings: tuple[Finding, ...]


def predict(row: StrategyRow) -> Outcome:
    """What the model makes of a row: its strategy at its best parameters, fixed ones as given; ranges as plans have.

    Raises
    ------
    CalibrationError
        If the machine, strategy, parameters or times of the row cannot be used, or the strategy refuses the operator.
    """
    try:
        shapes = zip(*(map(int, map(float, row.keys[key].split("+"))) for key in SIZES), strict=True)
        outcomes = [_predict(row, *shape) for shape in shapes]
    except OverlapSimError as error:
        raise CalibrationError(f"row {row.id}: {error}") from error
    if len(outcomes) == 1:
        return outcomes[0]

    def mean(field: str) -> float:
        return math.fsum(getattr(outcome, field) for outcome in outcomes) / len(outcomes)

    value, low, high, total, baseline = map(mean, ("value", "low", "high", "total", "baseline"))
    findings = dict.fromkeys(finding for outcome in outcomes for finding in outcome.findings)
    return Outcome(value, low, high, total, baseline, outcomes[0].parameters, tuple(findings))


def _predict(row: StrategyRow, m: int, n: int, k: int) -> Outcome:
    keys, strategy, ranks = row.keys, load_strategy(row.keys["strategy"]), int(float(row.keys["ranks"]))
    gemm = GemmOp(m, n, k, keys.get("dtype", "bf16"), keys.get("accumulate", "fp32"))
    kind: Any = keys["collective"]
    kernel_s = row.seconds("kernel_ms")
    prices = PriceBook(
        load_cluster(keys["cluster"]),
        ranks,
        gemm=gemm,
        kind=kind,
        gemm_time_s=row.seconds("gemm_ms"),
        kernel_time_s={} if kernel_s is None else {strategy.name: kernel_s},
    )
    context = Context(gemm_and_collective(gemm, kind, ranks), prices)
    answer = strategy.applies_to(context)
    if not answer.applies:
        raise CalibrationError(f"{strategy.name} does not apply: {'; '.join(answer.reasons)}")
    launch_s = launch_stack(keys.get("stack", "graph"), prices.cluster.device).host_s
    timed = [(time_s(strategy, context, point, launch_s), point) for point in _points(strategy, context, row.fixed)]
    total, parameters = min(timed, key=lambda entry: entry[0])
    serial = load_strategy("serial")

    def value(book: PriceBook) -> tuple[float, float, float]:
        here = replace(context, prices=book)
        overlapped = total if book is prices else time_s(strategy, here, parameters, launch_s)
        baseline = time_s(serial, here, {}, launch_s) if row.keys["metric"] == "speedup" else math.nan
        return _metric(row, book, gemm, overlapped, baseline) * SCALE[row.unit], overlapped, baseline

    middle, _, baseline = value(prices)
    low = high = 0.0
    for family, end in itertools.product(FAMILIES, ("low", "high")):
        moved = value(prices.at(family, "low" if end == "low" else "high"))[0] - middle
        low, high = low + min(0.0, moved) ** 2, high + max(0.0, moved) ** 2
    findings = strategy.findings(context, parameters)
    return Outcome(middle, middle - low**0.5, middle + high**0.5, total, baseline, parameters, findings)


def _points(strategy: Strategy, context: Context, fixed: Mapping[str, tuple[Any, ...]]) -> Iterator[Parameters]:
    """The strategy's proposals, best first, with the known parameters in place of its own."""
    seen = set()
    for proposal in propose(strategy.parameters(context)):
        for values in itertools.product(*fixed.values()):
            point = {**proposal.parameters, **dict(zip(fixed, values, strict=True))}
            if repr(point) in seen:
                continue
            seen.add(repr(point))
            strategy.check(point)
            yield point
            if len(seen) == RUNS:
                return


def time_s(strategy: Strategy, context: Context, parameters: Parameters, launch_s: float) -> float:
    """Time of one operator pair: alone, or with a host that launches, behind another one like it."""
    gemm = context.pair().gemm
    pairs = {(gemm.name, gemm.pass_): Chosen(strategy, parameters)} if strategy.overlaps else {}
    return simulate_piece(context, Composition(pairs=pairs), launch_s=launch_s).duration_s


def _metric(row: StrategyRow, prices: PriceBook, gemm: GemmOp, total_s: float, serial_s: float) -> float:
    vendor_s, comm_s = row.seconds("gemm_ms"), row.seconds("comm_ms")
    kernel_s = row.seconds("kernel_ms")
    alone_s = kernel_s or vendor_s or prices.vendor_gemm(gemm).duration_s
    match row.keys["metric"]:
        case "total":
            return total_s
        case "exposed":
            return total_s - alone_s
        case "share":
            return 1 - alone_s / total_s
        case "speedup":
            return serial_s / total_s
        case _:
            assert vendor_s is not None and comm_s is not None
            best_s = min(vendor_s, alone_s)
            return 1 - (total_s - best_s) / (vendor_s + comm_s - best_s)
