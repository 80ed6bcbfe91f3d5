"""Suite ``steps``: iteration times of Megatron-LM on A100 clusters, predicted with one A100 profile."""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from overlapsim.accuracy.progress import counted
from overlapsim.accuracy.steps_ablations import ablations
from overlapsim.accuracy.steps_choice import choice_notes
from overlapsim.accuracy.steps_data import (
    Measured,
    Published,
    bundled_text,
    marked,
    published_steps,
    read_vtrain,
)
from overlapsim.accuracy.steps_inputs import (
    FINDINGS,
    measured_seconds,
    published_inputs,
    vtrain_inputs,
)
from overlapsim.accuracy.steps_layer import layer_rows
from overlapsim.accuracy.steps_multi import Models, leave_models_out
from overlapsim.accuracy.steps_scoring import Timed, by_cell, common_bias, kendall_tau, ordered, summary
from overlapsim.accuracy.steps_single import Singles, left_out, microseconds, prior, representatives, transferred
from overlapsim.accuracy.suite import Row, Suite, score
from overlapsim.errors import CalibrationError
from overlapsim.plan import Finding
from overlapsim.step.simulate import StepResult, simulate_step

SUITE: Final = "steps"
REPORT_ONLY: Final = ("sc21-table2", "530b", "llama3-405b")
"""Groups that no target stands on: one site contradicts another, or what decides is not printed."""
TABLES: Final = ("vtrain_multi", "vtrain_single")
ABLATED: Final = 3
"""Every third unmarked row is run again for each effect."""


def evaluate(data: Path | None = None) -> Suite:
    """Score the bundled tables, or the rows of a file in vTrain's format.

    Groups: ``vtrain-multi`` and ``vtrain-multi-marked`` (nothing fitted), ``vtrain-single-gpu-bound`` and
    ``-host-bound`` (host constants fitted on the other cells), ``sc21``, ``korthikanti-iterations``,
    ``korthikanti-layer``, ``megascale-megatron-175b`` (nothing fitted), and groups that are only reported. Notes:
    order, cells, fits with one model left out, bias and spread, ablations.

    Parameters
    ----------
    data : table to score instead of the bundled ones; marks are made within it, fits come from the bundled tables

    Raises
    ------
    CalibrationError
        If the file cannot be read or a row is malformed.
    """
    known = [row for name in TABLES for row in read_vtrain(bundled_text(name), f"{name}.csv")]
    if data is None:
        asked, text = known, "".join(bundled_text(name) for name in (*TABLES, "papers", "korthikanti_layer"))
    else:
        text = _read(data)
        asked = read_vtrain(text, data.name)
    split_text = _split_text()
    split = yaml.safe_load(split_text)
    models: Models = {}
    rows, notes = _multi_rows([row for row in asked if not row.one_node], known, split, models, ablate=data is None)
    single, single_notes = _single_rows([row for row in asked if row.one_node], known, split)
    rows, notes = rows + single, notes | single_notes | _choice_notes(asked, rows + single)
    findings: tuple[Finding, ...] = FINDINGS[:2]
    if data is None:
        published, published_notes = _published_rows()
        rows, notes, findings = rows + published, notes | published_notes, FINDINGS
    digest = hashlib.sha256((split_text + text).encode()).hexdigest()
    return score(SUITE, rows, digest, findings=findings, notes=notes)


# Several nodes


def _multi_rows(
    asked: Sequence[Measured], known: Sequence[Measured], split: Any, models: Models, *, ablate: bool
) -> tuple[list[Row], dict[str, Any]]:
    if not asked:
        return [], {}
    suspect, rows = marked(asked), list[Row]()
    results: dict[str, StepResult] = {}
    for row in counted("rows of several nodes", asked):
        result = results[row.id] = simulate_step(vtrain_inputs(row), models=models)
        name = "vtrain-multi-marked" if row.id in suspect else "vtrain-multi"
        rows.append(_row(row.id, name, row.time_s, result, fitted=None if row.id in suspect else False))
    rows.sort(key=lambda row: row.group)
    errors = {row.id: row.error for row in rows}
    clear = [row for row in asked if row.id not in suspect]
    notes: dict[str, Any] = {
        "vtrain-multi, all rows, nothing fitted": summary(list(errors.values())),
        "vtrain-multi, unmarked, nothing fitted": summary([errors[row.id] for row in clear]),
        **_order_notes("vtrain-multi", clear, {key: result.step_time_s for key, result in results.items()}),
    }
    others = [row for row in known if not row.one_node]
    # Rows of the fit that are not asked for are predicted too.
    seconds = {row.id: results[row.id].step_time_s for row in asked}
    for row in counted("rows of the fit", others):
        if row.id not in seconds:
            seconds[row.id] = simulate_step(vtrain_inputs(row), ranges=False, models=models).step_time_s
    bounds = {name: tuple(limits) for name, limits in split["multipliers"].items()}
    without, chosen = leave_models_out(others, asked, seconds, bounds, models)
    notes["vtrain-multi, all rows, multipliers fitted on the other models"] = summary(without.tolist())
    notes["multipliers with one model left out"] = chosen
    if ablate:
        some = clear[::ABLATED]
        found = ablations(some, seconds, models)
        bubble = [results[row.id].breakdown_s["bubble"] / seconds[row.id] for row in some]
        found["no bubble"] = -round(float(np.median(bubble)), 4)
        notes["median change of the step time on every third unmarked row"] = _percentages(found)
    return rows, notes


# One node


def _single_rows(asked: Sequence[Measured], known: Sequence[Measured], split: Any) -> tuple[list[Row], dict[str, Any]]:
    if not asked:
        return [], {}
    singles = Singles(split["host_us"])
    others = [row for row in known if row.one_node]
    cells = representatives(asked)
    constants = left_out(singles, others, cells)
    bound = {cell: singles.host_bound(row) for cell, row in cells.items()}
    rows = []
    for row in counted("rows of one node", asked):
        found = singles.predict(row, constants[row.cell])
        name = f"vtrain-single-{'host' if bound[row.cell] else 'gpu'}-bound"
        rows.append(Row(row.id, name, row.time_s, found.step_s, found.low_s, found.high_s, "s", False))
    errors = [row.error for row in rows]
    notes: dict[str, Any] = {
        "vtrain-single, cells left out": summary(errors) + _cells(asked, errors),
        "constants with cells left out": microseconds(constants),
    }
    shipped = [singles.seconds(row, prior()) / row.time_s - 1 for row in asked]
    notes["vtrain-single, nothing fitted"] = summary(shipped) + _cells(asked, shipped)
    for name, (members, fit) in transferred(singles, others).items():
        chosen = [row for row in asked if row.hidden == members[0].hidden]
        moved = [singles.seconds(row, fit) / row.time_s - 1 for row in chosen]
        notes[f"vtrain-single, {name}"] = f"{summary(moved)}{_cells(chosen, moved)} ({microseconds(fit)})"
    predicted = {row.id: row.predicted for row in rows}
    notes |= _order_notes("vtrain-single", asked, predicted)
    rows.sort(key=lambda row: row.group)
    return rows, notes


def _cells(rows: Sequence[Measured], errors: Sequence[float]) -> str:
    if not rows:
        return ""
    median, mean = by_cell([row.cell for row in rows], errors)
    return f"; cells: median {100 * median:.1f}, mean {100 * mean:.1f} %"


def _choice_notes(asked: Iterable[Measured], rows: Iterable[Row]) -> dict[str, str]:
    """How good the layout is that predictions put first, over one model, machine and batch."""
    predicted = {row.id: row.predicted for row in rows}
    tables: dict[str, list[Timed]] = {}
    for row in asked:
        timed = Timed((row.model, row.gpus, row.global_batch), row.time_s, predicted[row.id])
        tables.setdefault("vtrain-single" if row.one_node else "vtrain-multi, all rows", []).append(timed)
    return choice_notes(tables)


def _order_notes(name: str, rows: Iterable[Measured], predicted_s: dict[str, float]) -> dict[str, Any]:
    timed = [Timed((row.model, row.gpus, row.global_batch), row.time_s, predicted_s[row.id]) for row in rows]
    right, total = ordered(timed)
    if not total:
        return {}
    taus = list(kendall_tau(timed).values())
    text = f"{right} of {total} ({100 * right / total:.1f} %)"
    return {
        f"{name}: pairs more than 5 % apart ordered right": text,
        f"{name}: Kendall tau over pairs more than 3 % apart": (
            f"mean {np.mean(taus):.2f} of {len(taus)} groups, lowest {min(taus):.2f}"
        ),
    }


# Papers


def _published_rows() -> tuple[list[Row], dict[str, Any]]:
    rows = list[Row]()
    models: dict[str, Models] = {}
    ranges: dict[object, tuple[float, float]] = {}
    for entry in published_steps():
        inputs = published_inputs(entry)
        own = models.setdefault(inputs.cluster.name, {})
        result = simulate_step(inputs, ranges=False, models=own)
        measured_s = measured_seconds(entry, result.model_flop, inputs.cluster.device.peak(inputs.model.dtype))
        rows.append(_ranged(entry, result, measured_s, ranges))
    rows += layer_rows()
    by_group: dict[str, list[Row]] = {}
    for row in rows:
        by_group.setdefault(row.group, []).append(row)
    notes: dict[str, Any] = {}
    bias, spread, worst = common_bias([row.error for row in by_group["sc21"]])
    notes["sc21: common bias, median and largest error without it"] = (
        f"{100 * bias:+.1f} %, {100 * spread:.1f} %, {100 * worst:.1f} %"
    )
    gains = {row.id: row for row in by_group["korthikanti-iterations"]}
    for size in ("22B", "175B"):
        full, selective = (gains[f"korthikanti-{size}-{kind}"] for kind in ("full", "selective"))
        notes[f"korthikanti {size}: gain of selective recompute and sequence parallelism, predicted (measured)"] = (
            f"{100 * (full.predicted / selective.predicted - 1):.1f} % "
            f"({100 * (full.measured / selective.measured - 1):.1f} %)"
        )
    notes["llama3-405b at a sustained clock of 0.8"] = _llama_note()
    return [row for members in by_group.values() for row in members], notes


def _llama_note() -> str:
    (entry,) = (entry for entry in published_steps() if entry.group == "llama3-405b")
    inputs = replace(published_inputs(entry), sustained_clock=0.8)
    result = simulate_step(inputs, ranges=False)
    measured_s = measured_seconds(entry, result.model_flop, inputs.cluster.device.peak(inputs.model.dtype))
    return f"{100 * (result.step_time_s / measured_s - 1):+.1f} %"


def _ranged(entry: Published, result: StepResult, measured_s: float, ranges: dict[object, tuple[float, float]]) -> Row:
    """With the relative range of a step of one round of micro-batches, the same for all sizes of one job."""
    inputs = result.inputs
    key = (entry.group, entry.model, entry.recompute, entry.virtual, entry.micro_batch)
    if key not in ranges:
        batch = inputs.layout.dp * inputs.job.micro_batch * min(inputs.num_micro_batches, inputs.layout.pp)
        short = simulate_step(replace(inputs, job=replace(inputs.job, global_batch=batch)))
        ranges[key] = short.low_s / short.step_time_s, short.high_s / short.step_time_s
    seconds = result.step_time_s
    low, high = (seconds * share for share in ranges[key])
    fitted = None if entry.group in REPORT_ONLY else False
    return Row(entry.id, entry.group, measured_s, seconds, low, high, "s", fitted)


def _row(name: str, group: str, measured_s: float, result: StepResult, *, fitted: bool | None) -> Row:
    return Row(name, group, measured_s, result.step_time_s, result.low_s, result.high_s, "s", fitted)


def _percentages(shares: dict[str, float]) -> str:
    ordered_shares = sorted(shares.items(), key=lambda item: -abs(item[1]))
    return ", ".join(f"{name} {100 * share:+.1f} %" for name, share in ordered_shares)


def _split_text() -> str:
    return (importlib.resources.files("overlapsim.accuracy") / "splits" / "steps.yaml").read_text(encoding="utf-8")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"cannot read {path}: {error}") from None
