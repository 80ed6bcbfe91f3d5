"""Suite ``strategies``: overlapped operators that others published, each predicted by the strategy it was run with."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

from overlapsim.accuracy.progress import counted
from overlapsim.accuracy.strategy_rows import Outcome, StrategyRow, parse_rows, predict
from overlapsim.accuracy.suite import Row, Suite, score
from overlapsim.accuracy.value_file import read_text
from overlapsim.plan import Finding

SUITE: Final = "strategies"


def evaluate(data: Path | None = None) -> Suite:
    """Score the bundled figures, or the rows of a ``id,value,unit`` file.

    No constant was fitted to any of them, so ``fitted`` is null. Rows with the metric ``speedup`` are compared with 1
    as well (``sign``), those published as 1 excepted. Notes: what each row was predicted at, with the parameters taken.

    Parameters
    ----------
    data : file to score instead (docs/accuracy.md, strategies)

    Raises
    ------
    CalibrationError
        If the file cannot be read, or a row is malformed or cannot be predicted.
    """
    name, text = read_text(data, "strategies.csv")
    rows = parse_rows(text, name)
    outcomes = [predict(row) for row in counted("published figures", rows)]
    findings: dict[Finding, None] = dict.fromkeys(f for outcome in outcomes for f in outcome.findings)
    scored = [_scored(row, outcome) for row, outcome in zip(rows, outcomes, strict=True)]
    notes: dict[str, Any] = {
        _short(row): f"{outcome.value:.3g} {row.unit}, published {row.value:.3g}; {_text(outcome)}"
        for row, outcome in zip(rows, outcomes, strict=True)
    }
    return score(SUITE, scored, hashlib.sha256(text.encode()).hexdigest(), findings=findings, notes=notes)


def _scored(row: StrategyRow, outcome: Outcome) -> Row:
    signed = row.keys["metric"] == "speedup" and row.value != 1
    sign = int((outcome.value > 1) == (row.value > 1)) if signed else None
    return Row(row.id, row.group, row.value, outcome.value, outcome.low, outcome.high, row.unit, None, sign)


def _short(row: StrategyRow) -> str:
    keys = row.keys
    many = keys["m"].count("+") + 1
    shape = f"{many} shapes" if many > 1 else f"{keys['m']},{keys['n']},{keys['k']}"
    name = "" if many == 1 else f" {keys['strategy']}"
    return f"{row.group} {keys['collective']} {shape} x{keys['ranks']}{name} {keys['metric']}"


def _text(outcome: Outcome) -> str:
    chosen = ", ".join(f"{key} {_value(value)}" for key, value in outcome.parameters.items())
    return f"{outcome.total * 1e3:.3f} ms with {chosen}"


def _value(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
