"""Suite ``gemm``: fitted GEMM times on shapes, sizes and devices that the fit has not seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from overlapsim.accuracy.gemm_data import (
    GivenTable,
    Splits,
    bundled_tables,
    device,
    load_splits,
    read_given,
    split_files,
)
from overlapsim.accuracy.progress import counted
from overlapsim.accuracy.suite import Row, Suite, score, sha256_of
from overlapsim.calibration.fit_gemm import anchors, fit_gemm, modelled, predicted, spread_by_regime
from overlapsim.calibration.fit_gemm_device import sister_fit
from overlapsim.calibration.gemm_splits import hash_share, splits
from overlapsim.cost.gemm import gemm_cost
from overlapsim.cost.gemm_fitted import UNKNOWN, FittedGemm, GemmRows, bundled_rows, fitted_gemm, regime
from overlapsim.errors import OverlapSimError
from overlapsim.hardware.profile import Fit
from overlapsim.plan import Finding
from overlapsim.workload.operators import GemmOp

FloatArray = NDArray[np.float64]
Ranges = Mapping[str, tuple[float, float]]

SUITE: Final = "gemm"
# Where a group has no range of its own: a parametric form without residuals, a device from 120 shapes.
PARAMETRIC: Final = (0.75, 1.30)


def evaluate(data: Path | None = None) -> Suite:
    """Score the bundled tables by their splits, or the tables of a file.

    Parameters
    ----------
    data : CSV with columns ``source_table,dtype,m,n,k,time_us``; the device is found by the table's name

    Raises
    ------
    CalibrationError
        If the file cannot be read or holds something else.
    """
    committed = load_splits()
    return _bundled(committed) if data is None else _given(committed, data)


def _bundled(committed: Splits) -> Suite:
    rows, notes, density = list[Row](), dict[str, Any](), dict[str, int]()
    for name, dtype, table in counted("tables of GEMM times", bundled_tables(committed)):
        density[name] = density.get(name, 0) + len(table)
        parts = list[tuple[str, GemmRows, FloatArray, FloatArray]]()
        for split, (seen, unseen) in splits(table).items():
            fit = committed.fits[name, dtype, split]
            kind = "blocked" if split.startswith("blocked") else split
            times = predicted(fit, device(name), table[unseen], table[seen])
            alone = predicted(fit, device(name), table[unseen])
            parts.append((kind, table[unseen], times, alone))
        rows += _split_rows(f"{name} {dtype}", parts)
        notes[f"bias in % by regime, {name} {dtype}"] = _bias(parts)
        notes[f"parametric alone, median/p90 in %, {name} {dtype}"] = _alone(parts)
    for left, right in committed.rules["sisters"]:
        rows += _sister_rows(left, right)
    rows += _left_out(committed.rules["left_out"]["device"], committed.rules["left_out"]["rows"])
    notes |= {
        f"density, {name}": f"{count} of {committed.rules['tables'][name]['published']} published shapes"
        for name, count in density.items()
    }
    notes["from 120 shapes, median/p90 in % on the rest of a table"] = _from_few(committed)
    return score(SUITE, rows, sha256_of(*split_files()), notes=notes)


def _split_rows(title: str, parts: list[tuple[str, GemmRows, FloatArray, FloatArray]]) -> list[Row]:
    """Rows of every split, each with the ranges made from the other half of unfitted rows."""
    known = [(part, times) for kind, part, times, _ in parts if kind != "large_m"]
    halves = [hash_share(part, "range") < 0.5 for part, _ in known]
    ranges = []
    for first in (False, True):
        picked = [half if first else ~half for half in halves]
        ratio = np.concatenate(
            [part.time_s[pick] / times[pick] for (part, times), pick in zip(known, picked, strict=True)]
        )
        m, k = (
            np.concatenate([getattr(part, axis)[pick] for (part, _), pick in zip(known, picked, strict=True)])
            for axis in "mk"
        )
        ranges.append(spread_by_regime(ratio, m, k))
    rows = list[Row]()
    for kind, part, times, alone in parts:
        half = hash_share(part, "range") < 0.5
        group = f"{title} {'m > 2048' if kind == 'large_m' else kind}"
        both = [_outside(side) if kind == "large_m" else side for side in ranges]
        rows += _rows(group, part[half], times[half], both[0], fitted=False)
        rows += _rows(group, part[~half], times[~half], both[1], fitted=False)
        if kind == "hashed":
            rows += _rows(f"{group}, parametric", part, alone, {}, fitted=None)
    return rows


def _outside(ranges: Ranges) -> Ranges:
    """Ranges beyond the measured box, as prices have them."""
    return {name: (min(low, UNKNOWN.low), max(high, UNKNOWN.high)) for name, (low, high) in ranges.items()}


def _rows(group: str, part: GemmRows, times: FloatArray, ranges: Ranges, *, fitted: bool | None) -> Iterator[Row]:
    whole = (min(low for low, _ in ranges.values()), max(high for _, high in ranges.values())) if ranges else PARAMETRIC
    for m, n, k, measured, time in zip(
        *(a.tolist() for a in (part.m, part.n, part.k, part.time_s, times)), strict=True
    ):
        low, high = ranges.get(regime(m, k), whole)
        us = 1e6 * time
        name = f"{group}|{m:.0f}x{n:.0f}x{k:.0f}"
        yield Row(name, group, 1e6 * measured, us, us * min(low, 1.0), us * max(high, 1.0), "us", fitted)


def _bias(parts: list[tuple[str, GemmRows, FloatArray, FloatArray]]) -> str:
    """Signed median error of the hashed unfitted half by regime: with residuals, and the parametric form alone."""
    _, part, times, alone = next(entry for entry in parts if entry[0] == "hashed")
    names = np.array([regime(m, k) for m, k in zip(part.m, part.k, strict=True)])
    told = []
    for name in dict.fromkeys(names.tolist()):
        where = names == name
        both = (100 * np.median(values[where] / part.time_s[where] - 1) for values in (times, alone))
        told.append(f"{name} {next(both):+.1f} ({next(both):+.1f})")
    return ", ".join(told) + " (parametric alone)"


def _alone(parts: list[tuple[str, GemmRows, FloatArray, FloatArray]]) -> str:
    """Errors of the parametric form on unfitted rows, by split."""
    errors: dict[str, list[FloatArray]] = {}
    for kind, part, _, alone in parts:
        errors.setdefault(kind, []).append(np.abs(alone / part.time_s - 1))
    whole = {kind: np.concatenate(found) for kind, found in errors.items()}
    return ", ".join(f"{kind} {100 * np.median(e):.1f}/{100 * np.quantile(e, 0.9):.1f}" for kind, e in whole.items())


def _sister_rows(left: str, right: str) -> Iterator[Row]:
    """Rows of `right` predicted from the fit and table of `left` and the datasheet of `right`."""
    for dtype in ("bf16", "fp8"):
        fit, table = device(left).fits.get(f"gemm.{dtype}"), bundled_rows(f"gemm/{right}.csv", dtype)
        if fit is not None and table is not None:
            taken = sister_fit(fit, device(left), device(right))
            times = _as_measured(_with(taken, left, right), table)
            yield from _rows(f"{right} {dtype} from {left}", table, times, taken.spread, fitted=False)


def _with(fit: Fit, owner: str, name: str) -> FittedGemm:
    """The device `name` with a fit of `owner` instead of its own."""
    own = replace(device(name), fits={f"gemm.{fit.key}": fit})
    found = fitted_gemm(own, fit.key)
    assert found is not None and found.layer is not None, f"{owner} has no table"
    return found


def _as_measured(model: FittedGemm, table: GemmRows) -> FloatArray:
    """Times for rows as a table timed them: quantising, and operands left in L2, included."""
    quantise = model.quantises
    times = model.seconds(table.m, table.n, table.k, quantise=quantise)
    if model.parameters.warm_rate == 1.0:
        return times
    cold = replace(model.parameters, warm_rate=1.0)
    return times * modelled(table, model.machine, model.parameters) / modelled(table, model.machine, cold)


def _left_out(name: str, count: int) -> Iterator[Row]:
    fit, rest = _fit_few(name, count)
    times = predicted(fit, device(name), rest)
    yield from _rows(f"{name} bf16 from {count} shapes", rest, times, {}, fitted=False)


def _fit_few(name: str, count: int) -> tuple[Fit, GemmRows]:
    table = bundled_rows(f"gemm/{name}.csv", "bf16")
    assert table is not None
    few = anchors(table, count)
    return fit_gemm(table[few], device(name)), table[~few]


def _from_few(committed: Splits) -> str:
    told = []
    for name in committed.rules["tables"]:
        if committed.is_warm(name):
            continue
        fit, rest = _fit_few(name, committed.rules["left_out"]["rows"])
        error = np.abs(predicted(fit, device(name), rest) / rest.time_s - 1)
        told.append(f"{name} {100 * np.median(error):.1f}/{100 * np.quantile(error, 0.9):.1f}")
    return ", ".join(told)


def _given(committed: Splits, data: Path) -> Suite:
    rows, findings, notes = list[Row](), list[Finding](), dict[str, Any]()
    for table in read_given(data):
        try:
            rows += _given_rows(committed, table, notes)
        except OverlapSimError as error:
            findings.append(Finding("table_not_scored", f"{table.name} {table.dtype}: {error}"))
            continue
        if table.device is None:
            findings.append(
                Finding(
                    "unknown_device", f"{table.name}: no profile's chip is in the name; {len(table.rows)} rows left out"
                )
            )
    return score(SUITE, rows, sha256_of(data), findings=findings, notes=notes)


def _given_rows(committed: Splits, table: GivenTable, notes: dict[str, Any]) -> Iterator[Row]:
    if table.device is None:
        return
    spec, rows, title = device(table.device), table.rows, f"{table.name} {table.dtype}"
    model = fitted_gemm(spec, table.dtype)
    if model is None:
        notes[f"{title}: model"] = f"{table.device} has no fit: tiles and waves with the profile's efficiencies"
        shapes = np.stack((rows.m, rows.n, rows.k), axis=1).astype(int).tolist()
        seconds = np.array(
            [gemm_cost(GemmOp(shape[0], shape[1], shape[2], table.dtype), spec).duration_s for shape in shapes]
        )
        yield from _rows(f"{title} (no fit)", rows, seconds, {}, fitted=False)
        return
    seen = _seen(model, table)
    if table.is_linear:
        times = _as_measured(model, rows)
        alone = modelled(rows, model.machine, model.parameters)
    else:
        times = model.seconds(rows.m, rows.n, rows.k)
        alone = model.seconds(rows.m, rows.n, rows.k, residual=False)
    sister = "" if model.fit.num_points else f" ({model.fit.notes.split(';')[0]})"
    for fitted, where in ((False, ~seen), (True, seen)):
        if where.any():
            group = f"{title}{sister}{' fitted' if fitted else ''}"
            yield from _rows(group, rows[where], times[where], model.fit.spread, fitted=fitted)
    yield from _rows(f"{title}, parametric", rows, alone, {}, fitted=None)
    for left, right in committed.rules["other_sisters"]:
        fit = device(left).fits.get(f"gemm.{table.dtype}")
        if right == table.device and fit is not None and table.is_linear:
            taken = _with(sister_fit(fit, device(left), spec), left, right)
            yield from _rows(
                f"{title} (sister: {left})", rows, _as_measured(taken, rows), taken.fit.spread, fitted=False
            )


def _seen(model: FittedGemm, table: GivenTable) -> NDArray[np.bool_]:
    """Rows that the device's own table holds with the same time."""
    own = bundled_rows(model.fit.source.reference, table.dtype) if model.fit.num_points and table.is_linear else None
    if own is None:
        return np.zeros(len(table.rows), dtype=bool)
    known = {tuple(shape) for shape in np.stack((own.m, own.n, own.k), axis=1).tolist()}
    shapes = np.stack((table.rows.m, table.rows.n, table.rows.k), axis=1).tolist()
    return np.array([tuple(shape) in known for shape in shapes])
