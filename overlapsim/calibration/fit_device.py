"""Kernels of one device: GEMMs by type and memory-bound operators, judged on shapes that a fit had not seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from overlapsim.calibration.fit_operators import fit_device_memory
from overlapsim.calibration.gemm_shapes import (
    Form,
    bound_seconds,
    fit_form,
    fit_seconds,
    forms_of,
    is_of_layers,
    profile_seconds,
    rows_of,
    spread,
)
from overlapsim.calibration.plausible import check_times
from overlapsim.calibration.records import Record
from overlapsim.calibration.regimes import TIME_REGIMES, RegimeError, judge, told
from overlapsim.cost.memory_bound import memory_prices, memory_seconds
from overlapsim.cost.priced import REGIMES, regimes
from overlapsim.hardware.profile import DeviceSpec, Fit
from overlapsim.plan import Finding
from overlapsim.units import DTYPE_BYTES, format_time

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

# Two thirds of the shapes; below, the constants of the form are not determined.
LEAST_MEMORY_ROWS: Final = 16
LEAST_SPREAD_POINTS: Final = 10
TEST_EVERY: Final = 3
# What a fitted form misses by more than this and 8 robust deviations is a stray row, not a shape.
LEAST_FACTOR: Final = 2.0
DEVIATIONS: Final = 8.0
# More rows than this are not stray: then the form does not hold, and must be judged with them.
MAX_STRAY_SHARE: Final = 0.03
MAX_LISTED: Final = 5


@dataclass(frozen=True)
class KernelTable:
    """Solo times of one kernel on one device, one entry a shape.

    Attributes
    ----------
    name : ``gemm.bf16``, ``memory.rmsnorm``
    dtype : of the operands
    shapes : columns m, n, k (GEMM) or rows, columns
    time_s : medians
    noise : half the distance of the percentiles over the median, at the median over shapes; None without repeats
    """

    name: str
    dtype: str
    shapes: NDArray[np.int64]
    time_s: FloatArray
    noise: float | None


@dataclass(frozen=True)
class KernelFit:
    """A fitted kernel and how well it holds on shapes it had not seen.

    Attributes
    ----------
    table, fit : what was fitted; None where there were too few shapes
    used, test : of the table's rows: not left out; held out
    base_s : price of the base profile
    regimes : errors by time of held-out shapes, by a fit of the others
    over_base : measured over the base's price, median of the larger half
    """

    table: KernelTable
    fit: Fit | None
    used: BoolArray
    test: BoolArray
    regimes: tuple[RegimeError, ...]
    over_base: float
    accepted: bool
    findings: tuple[Finding, ...]


def kernel_tables(records: Iterable[Record]) -> tuple[list[KernelTable], list[Finding]]:
    """Tables of the solo, valid GEMM and memory-bound records; types that no model prices are named in a finding."""
    groups: dict[tuple[str, str], dict[tuple[int, ...], list[Record]]] = defaultdict(lambda: defaultdict(list))
    unpriced: dict[str, int] = defaultdict(int)
    for record in records:
        if record.kind not in ("gemm", "memory") or not record.alone or not record.valid or record.sms_left:
            continue
        if record.dtype not in DTYPE_BYTES:
            unpriced[record.dtype or "unnamed type"] += 1
            continue
        sizes = (record.m, record.n, record.k) if record.kind == "gemm" else (record.m, record.n)
        name = f"gemm.{record.dtype}" if record.kind == "gemm" else f"memory.{record.op}"
        groups[name, record.dtype][tuple(size for size in sizes if size is not None)].append(record)
    findings = [
        Finding("type_not_priced", f"{count} records of {dtype} were left out: no model prices that type")
        for dtype, count in sorted(unpriced.items())
    ]
    return [_table(name, dtype, groups[name, dtype]) for name, dtype in sorted(groups)], findings


def fit_kernel(table: KernelTable, device: DeviceSpec, base_name: str, reference: str) -> KernelFit:
    """Fit one table.

    Every third shape, in rising order of m, n, k, is held out to judge the form and to give its ranges; what is kept
    is then fitted to all shapes.

    Raises
    ------
    CalibrationError
        If the times cannot be what they say (`plausible.check_times`).
    ProfileError, WorkloadError
        If the device has no rate for the type, or no model knows the operator.
    """
    model = (
        _GemmModel(table, device, reference)
        if table.name.startswith("gemm.")
        else _MemoryModel(table, device, reference)
    )
    base_s, bound_s, work = model.base(), model.bound(), table.shapes.astype(np.float64).prod(axis=1)
    checked = check_times(table.name, base_name, table.time_s, base_s, bound_s, work)
    used = ~checked.too_fast
    test = np.arange(table.time_s.size) % TEST_EVERY == TEST_EVERY - 1
    findings = list(_fast(table, bound_s, checked.too_fast))
    fit: Fit | None = None
    predicted = base_s
    form = _best_form(model, table.time_s, used, test)
    if form is not None:
        fit = model.fit(form, used & ~test)
        predicted = model.seconds(fit)
        stray = _strays(table.time_s / predicted, used)
        if stray.any():
            findings += _stray(table, predicted, stray)
            used &= ~stray
            fit = model.fit(form, used & ~test)
            predicted = model.seconds(fit)
    errors = predicted / table.time_s - 1
    judged = used & test if fit is not None else used
    by_time = judge(errors[judged], table.time_s[judged], TIME_REGIMES)
    accepted = fit is not None and all(regime.accepted for regime in by_time)
    if fit is None:
        findings.append(
            Finding(
                "too_few_shapes",
                f"{table.name}: {int(used.sum())} shapes; too few for a fit, 60 to 120 make a good one: "
                f"{base_name}'s constants stay",
            )
        )
    elif not accepted:
        findings.append(
            Finding("not_accepted", f"{table.name}: not accepted, left out of the profile: {told(by_time)}")
        )
    if fit is not None and form is not None:
        # Ranges are those of the fit that had not seen the shapes; the constants then take in all of them.
        fit = replace(model.fit(form, used), spread=model.spread(fit, judged))
        if is_of_layers(fit):
            findings.append(
                Finding(
                    "quantising_layers",
                    f"{table.name}: times fit layers that also quantise their input, not kernels alone",
                )
            )
    return KernelFit(table, fit, used, test, by_time, checked.over_base, accepted, tuple(findings))


class _GemmModel:
    """The GEMM form on the shapes of a table."""

    def __init__(self, table: KernelTable, device: DeviceSpec, reference: str) -> None:
        self._table, self._device, self._reference = table, device, reference
        self._rows = rows_of(table.shapes, table.time_s)

    def base(self) -> FloatArray:
        return profile_seconds(self._device, self._table.dtype, self._table.shapes)

    def bound(self) -> FloatArray:
        return bound_seconds(self._device, self._table.dtype, self._table.shapes)

    def forms(self, num_rows: int) -> tuple[str, ...]:
        return forms_of(self._device, self._table.dtype, num_rows)

    def fit(self, form: str, rows: BoolArray) -> Fit:
        chosen = self._rows[rows]
        return fit_form(self._device, self._table.dtype, cast(Form, form), chosen, self._reference)

    def seconds(self, fit: Fit) -> FloatArray:
        return fit_seconds(fit, self._device, self._table.shapes)

    def spread(self, fit: Fit, judged: BoolArray) -> dict[str, tuple[float, float]]:
        return spread(self._rows, self.seconds(fit), judged)


class _MemoryModel:
    """A memory-bound operator on the grids of a table."""

    def __init__(self, table: KernelTable, device: DeviceSpec, reference: str) -> None:
        self._table, self._device, self._reference = table, device, reference
        self._op = table.name.partition(".")[2]
        self._rows, self._columns = table.shapes.T

    def base(self) -> FloatArray:
        return self._priced(self._device)

    def bound(self) -> FloatArray:
        prices = memory_prices(self._op, self._rows, self._columns, self._device, dtype=self._table.dtype)
        return np.asarray(prices.bound_s, dtype=np.float64)

    def forms(self, num_rows: int) -> tuple[str, ...]:
        return ("own",) if num_rows >= LEAST_MEMORY_ROWS else ()

    def fit(self, form: str, rows: BoolArray) -> Fit:
        shapes = self._table.shapes[rows].T
        times = self._table.time_s[rows]
        return fit_device_memory(
            self._device, self._op, shapes[0], shapes[1], self._table.dtype, times, reference=self._reference
        )

    def spread(self, fit: Fit, judged: BoolArray) -> dict[str, tuple[float, float]]:
        seconds = self.seconds(fit)
        floor_s = memory_prices(self._op, 1, 1, self._device, dtype=self._table.dtype).seconds
        regime = regimes(seconds, float(np.ravel(floor_s)[0]))
        found = {}
        for place, name in enumerate(REGIMES):
            mine = judged & (regime == place)
            if mine.sum() >= LEAST_SPREAD_POINTS:
                low, high = np.quantile(self._table.time_s[mine] / seconds[mine], (0.05, 0.95))
                found[name] = (min(1.0, float(low)), max(1.0, float(high)))
        return {**fit.spread, **found}

    def seconds(self, fit: Fit) -> FloatArray:
        return self._priced(replace(self._device, fits={**self._device.fits, f"memory.{self._op}": fit}))

    def _priced(self, device: DeviceSpec) -> FloatArray:
        return np.asarray(memory_seconds(self._op, self._rows, self._columns, device, dtype=self._table.dtype))


def _best_form(model: _GemmModel | _MemoryModel, time_s: FloatArray, used: BoolArray, test: BoolArray) -> str | None:
    """Form that predicts held-out shapes best; None if there are too few shapes for any."""
    off = {}
    for form in model.forms(int((used & ~test).sum())):
        seconds = model.seconds(model.fit(form, used & ~test))
        off[form] = float(np.median(np.abs(seconds / time_s - 1)[used & test]))
    return min(off, key=lambda form: off[form]) if off else None


def _table(name: str, dtype: str, shapes: dict[tuple[int, ...], list[Record]]) -> KernelTable:
    order = sorted(shapes)
    times, spreads = [], []
    for shape in order:
        same = [record.median_s for record in shapes[shape]]
        times.append(float(np.median(same)))
        for record in shapes[shape]:
            if record.p10_s is not None and record.p90_s is not None:
                spreads.append((record.p90_s - record.p10_s) / 2 / record.median_s)
        if len(same) > 1:
            spreads.append(float(np.ptp(same)) / 2 / times[-1])
    noise = float(np.median(spreads)) if spreads else None
    return KernelTable(name, dtype, np.array(order, dtype=np.int64), np.array(times), noise)


def _strays(ratio: FloatArray, used: BoolArray) -> BoolArray:
    """Rows that the fit misses by far more than it misses the rest."""
    off = np.abs(np.log(ratio) - np.median(np.log(ratio[used])))
    limit = max(np.log(LEAST_FACTOR), DEVIATIONS * 1.4826 * float(np.median(off[used])))
    stray: BoolArray = used & (off > limit)
    return stray if stray.sum() <= MAX_STRAY_SHARE * used.sum() else np.zeros_like(stray)


def _fast(table: KernelTable, bound_s: FloatArray, fast: BoolArray) -> Iterator[Finding]:
    yield from _listed(table, bound_s, fast, "faster than the device can be")


def _stray(table: KernelTable, predicted: FloatArray, stray: BoolArray) -> list[Finding]:
    return list(_listed(table, predicted, stray, "off from what other shapes say"))


def _listed(table: KernelTable, expected: FloatArray, rows: BoolArray, reason: str) -> Iterator[Finding]:
    places: Sequence[int] = [int(place) for place in np.flatnonzero(rows)]
    for place in places[:MAX_LISTED]:
        shape = "x".join(str(size) for size in table.shapes[place])
        yield Finding(
            "outlier",
            f"{table.name}: {shape} took {format_time(float(table.time_s[place]))}, expected about "
            f"{format_time(float(expected[place]))}: {reason}; left out",
        )
    if len(places) > MAX_LISTED:
        yield Finding("outlier", f"{table.name}: {len(places) - MAX_LISTED} more rows {reason}; left out")
