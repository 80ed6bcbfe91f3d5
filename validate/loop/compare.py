"""Last stage: predicted against measured, case by case, as a file and as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from overlapsim.validate.cases import Case
from overlapsim.validate.loop.measure import KERNELS, RECORDS

from overlapsim.accuracy.loop import FILE, SERIAL, LoopRow, dump_loop, margins_of, notes
from overlapsim.accuracy.suite import sha256_of
from overlapsim.errors import CalibrationError
from overlapsim.report.files import write_text
from overlapsim.units import format_time

CASES: Final = "cases.json"
PREDICTIONS: Final = "predictions.json"


def write_predictions(cases: Sequence[Case], folder: Path) -> None:
    """Write down what is predicted, before anything of it is run, and which measurements it stands on."""
    content = {
        "measured_sha256": _measured(folder),
        "cases": [
            {
                "case": case.name,
                "strategy": case.spec.strategy,
                "parameters": _compact(case.spec.parameters),
                "predicted_s": case.predicted_s,
                "low_s": case.low_s,
                "high_s": case.high_s,
            }
            for case in cases
        ],
    }
    write_text(folder / PREDICTIONS, json.dumps(content, indent=2) + "\n")


def are_predicted(folder: Path) -> bool:
    """Whether the folder holds predictions that stand on the measurements it holds."""
    try:
        content = json.loads((folder / PREDICTIONS).read_text(encoding="utf-8"))
        return bool(content["measured_sha256"] == _measured(folder))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_predictions(path: Path) -> dict[tuple[str, str, str], tuple[float, float, float]]:
    """Predictions by case, strategy and parameters.

    Raises
    ------
    CalibrationError
        If the file cannot be read.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["cases"]
        return {
            (entry["case"], entry["strategy"], entry["parameters"]): (
                entry["predicted_s"],
                entry["low_s"],
                entry["high_s"],
            )
            for entry in entries
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CalibrationError(f"{path} cannot be read: {error}; run the loop again") from None


def with_predictions(cases: Sequence[tuple[str, Any]], path: Path) -> list[Case]:
    """Cases of given specs with what was predicted of them."""
    known = read_predictions(path)
    return [Case(name, spec, *known[name, spec.strategy, _compact(spec.parameters)]) for name, spec in cases]


def kept_results(folder: Path) -> list[dict[str, Any]]:
    """Results of an earlier run of the same predictions: those of shapes of which every case is valid."""
    try:
        content = json.loads((folder / CASES).read_text(encoding="utf-8"))
        if content["predictions_sha256"] != sha256_of(folder / PREDICTIONS):
            return []
        entries: list[dict[str, Any]] = content["cases"]
        bad = {entry["case"] for entry in entries if not entry["valid"]}
        return [entry for entry in entries if entry["case"] not in bad]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def write_results(entries: Sequence[dict[str, Any]], header: dict[str, Any], nodes: int, folder: Path) -> None:
    """Write the results of all shapes that were run, with the predictions they belong to."""
    content = {
        "overlapsim_cases": 1,
        "header": header,
        "nodes": nodes,
        "predictions_sha256": sha256_of(folder / PREDICTIONS),
        "cases": list(entries),
    }
    write_text(folder / CASES, json.dumps(content, indent=2) + "\n")


def rows_of(path: Path) -> tuple[list[LoopRow], dict[str, Any]]:
    """Rows of the suite from the cases that were run, and where they were run.

    Raises
    ------
    CalibrationError
        If the file cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries, header = content["cases"], content["header"]
    except (OSError, ValueError, KeyError) as error:
        raise CalibrationError(f"{path} cannot be read: {error}; run the loop again") from None
    rows = [
        LoopRow(
            case=entry["case"],
            strategy=entry["strategy"],
            parameters=_compact(entry["parameters"]) if entry["parameters"] else "",
            collective=entry["collective"],
            m=entry["m"],
            n=entry["n"],
            k=entry["k"],
            dtype=entry["dtype"],
            ranks=entry["ranks"],
            nodes=content["nodes"],
            size_bytes=float(entry["size_bytes"]),
            predicted_s=entry["predicted_s"],
            low_s=entry["low_s"],
            high_s=entry["high_s"],
            measured_s=entry["measured_s"],
            p10_s=entry["p10_s"],
            p90_s=entry["p90_s"],
            noise=entry["noise"],
            repeats=entry["repeats"],
            rounds=len(entry["round_medians_s"]),
            valid=entry["valid"],
        )
        for entry in entries
    ]
    return rows, header


def write_rows(rows: Sequence[LoopRow], header: dict[str, Any], folder: Path) -> Path:
    """Write the file that ``accuracy --suite loop`` scores."""
    path = folder / FILE
    write_text(path, dump_loop(rows, header))
    return path


def print_table(rows: Sequence[LoopRow]) -> None:
    """Print every case: predicted, measured, signed error, noise, and whether it pays."""
    from rich.table import Table

    from overlapsim.cli.output import console

    margins = margins_of(rows)
    table = Table(
        title="held-out sizes: predicted before they were run, then measured (error: predicted over measured)"
    )
    for column in (
        "case",
        "strategy",
        "predicted",
        "measured",
        "error",
        "noise",
        "pays, predicted",
        "measured",
        "sign",
    ):
        table.add_column(column)
    for row in rows:
        margin = margins.get(row)
        pays = ("", "", "")
        if margin is not None:
            sign = ("right" if margin.right else "WRONG") if margin.decided else "within noise"
            pays = (f"{margin.predicted:+.1%}", f"{margin.measured:+.1%}", sign)
        table.add_row(
            row.case,
            row.strategy if row.strategy == SERIAL else f"{row.strategy} {_told(row)}",
            format_time(row.predicted_s),
            format_time(row.measured_s),
            f"{row.error:+.1%}",
            f"{row.noise:.1%}" if row.valid else f"{row.noise:.1%} not valid",
            *pays,
        )
    view = console(150)
    view.print(table)
    valid = [row for row in rows if row.valid]
    for key, text in notes(valid, margins_of(valid)).items():
        view.print(f"{key}: {text}", highlight=False, markup=False)


def _measured(folder: Path) -> str:
    return sha256_of(folder / RECORDS, folder / KERNELS)


def _told(row: LoopRow) -> str:
    parameters = json.loads(row.parameters) if row.parameters else {}
    if "chunks" in parameters:
        return f"{parameters['chunks']}"
    return f"{len(parameters['group_tiles'])}" if "group_tiles" in parameters else ""


def _compact(parameters: Any) -> str:
    return json.dumps(msgspec.to_builtins(parameters), separators=(",", ":"), sort_keys=True)
