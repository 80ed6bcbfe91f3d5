"""Suite ``moe``: mixture-of-experts training as MegaScale-MoE and its neighbours published it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.resources
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from overlapsim.accuracy.moe_comet import FINDINGS as COMET_FINDINGS
from overlapsim.accuracy.moe_comet import Forwards
from overlapsim.accuracy.moe_notes import notes_of, order_notes
from overlapsim.accuracy.moe_rows import Predicted
from overlapsim.accuracy.moe_steps import GROUPS, Steps
from overlapsim.accuracy.moe_systems import ASSUMED
from overlapsim.accuracy.progress import counted
from overlapsim.accuracy.suite import Row, Suite, score
from overlapsim.accuracy.value_file import SCALE, Figure, parse_figures, read_text
from overlapsim.errors import CalibrationError, OverlapSimError
from overlapsim.plan import Finding

SUITE: Final = "moe"
FILE: Final = "moe.csv"
CALIBRATED: Final = "fig13|gpu=h800|system=megascale-moe|metric=other"
"""The one row whose value a constant comes from: kernels of the gating chain (SOURCES.md, MSMOE-GATING)."""
COMET: Final = "comet-e2e"
OTHERS: Final[Mapping[str, tuple[str, str]]] = {
    "identities": ("overlapsim.accuracy.moe_identities", "identity_rows"),
    "memory": ("overlapsim.accuracy.moe_memory", "memory_rows"),
    "synchronisation": ("overlapsim.accuracy.moe_sync", "sync_rows"),
    "dispatch": ("overlapsim.accuracy.moe_dispatch", "dispatch_rows"),
    "fused kernels": ("overlapsim.accuracy.moe_kernels", "rows"),
}
"""Parts with rows of their own, bundled beside `FILE`: module, and function that returns rows, or rows and findings."""
PREDICTORS: Final[Mapping[str, tuple[str, str]]] = {"fig16": ("overlapsim.accuracy.moe_kernels", "predict_row")}
"""Further groups that ``--data`` may hold: module, and function from a `Figure` to `Predicted` in SI units."""
Predictor = Callable[[Figure], Predicted]


def evaluate(data: Path | None = None) -> Suite:
    """Score the bundled figures, or the rows of a ``id,value,unit`` file.

    One row calibrates (`CALIBRATED`, its own group, fitted); all others here are held out. Rows with a blank value are
    predicted only. Notes: what each target asks and what came out.

    Parameters
    ----------
    data : file to score instead (docs/accuracy.md, moe)

    Raises
    ------
    CalibrationError
        If the file cannot be read, or a row is malformed or cannot be predicted.
    """
    name, text = read_text(data, FILE)
    asked = parse_figures(text, name)
    steps, forwards = Steps(), Forwards()
    predictors: dict[str, Predictor] = {**dict.fromkeys(GROUPS, steps.predict), COMET: forwards.predict}
    rows = [_scored(row, predict(row, predictors)) for row in counted("published figures", asked)]
    # A system without a strategy has no prediction.
    rows = [row for row in rows if not math.isnan(row.predicted)]
    findings = [*_assumed(row.group for row in asked)]
    if data is None:
        for part in counted("parts with rows of their own", list(OTHERS)):
            more, said = own_rows(part)
            rows += more
            findings += said
    notes = notes_of(asked, rows, steps)
    if data is None:
        notes |= order_notes()
    digest = hashlib.sha256(text.encode()).hexdigest()
    return score(SUITE, _ranked(rows), digest, findings=dict.fromkeys(findings), notes=notes)


def predict(row: Figure, predictors: Mapping[str, Predictor]) -> Predicted:
    """Prediction of a row, in its unit.

    Raises
    ------
    CalibrationError
        If the group is unknown, or the row cannot be predicted.
    """
    try:
        found = _predictor(row, predictors)(row)
    except CalibrationError:
        raise
    except OverlapSimError as error:
        raise CalibrationError(f"row {row.id}: {error}") from error
    scale = SCALE[row.unit]
    return Predicted(found.value * scale, found.low * scale, found.high * scale)


def _predictor(row: Figure, predictors: Mapping[str, Predictor]) -> Predictor:
    if row.group in predictors:
        return predictors[row.group]
    if row.group in PREDICTORS:
        module, function = PREDICTORS[row.group]
        predictor: Predictor = getattr(importlib.import_module(module), function)
        return predictor
    raise CalibrationError(
        f"row {row.id}: group {row.group!r} is unknown; expected one of {', '.join((*predictors, *PREDICTORS))}"
    )


def own_rows(part: str) -> tuple[list[Row], list[Finding]]:
    """Rows and findings of a part of `OTHERS`."""
    module, function = OTHERS[part]
    found: Any = getattr(importlib.import_module(module), function)()
    if isinstance(found, tuple) and len(found) == 2 and not isinstance(found[0], Row):
        return list(found[0]), list(found[1])
    return list(found), []


def _scored(row: Figure, found: Predicted) -> Row:
    fitted = row.id == CALIBRATED
    group = f"{row.group} calibrated" if fitted else _group(row)
    return Row(row.id, group, row.value, found.value, found.low, found.high, row.unit, fitted)


def _group(row: Figure) -> str:
    """Name under which statistics are made: one kind of figure each."""
    system = row.keys.get("system", "")
    return " ".join(filter(None, (row.group, system, row.keys.get("gpu", ""), _kind(row.metric))))


def _kind(metric: str) -> str:
    return "" if metric in ("iteration", "latency", "mfu-ratio") else metric


def _ranked(rows: Sequence[Row]) -> list[Row]:
    """Rows group by group, in the order in which groups come first."""
    order = {name: number for number, name in enumerate(dict.fromkeys(row.group for row in rows))}
    return sorted(rows, key=lambda row: order[row.group])


def _assumed(groups: Iterable[str]) -> list[Finding]:
    present = set(groups)
    found = list(ASSUMED) if present & GROUPS.keys() else []
    return found + (list(COMET_FINDINGS) if COMET in present else [])
