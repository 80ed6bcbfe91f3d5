"""Measured steps: vTrain's tables, and steps printed in papers; which rows their own measurements make suspect."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from overlapsim.errors import CalibrationError
from overlapsim.hardware.catalogue import bundled

SUSPECT: Final = 1.12
"""Least share above the best of its model and tensor parallelism from which a row is marked."""
ONE_NODE: Final = 8
"""GPUs of a node: rows with no more belong to the composed table."""
_INTEGERS: Final = {
    "gpus": "# GPUs",
    "global_batch": "global batch",
    "micro_batch": "micro batch",
    "hidden": "hidden size",
    "heads": "attention heads",
    "layers": "# layers",
    "seq_len": "sequence length",
    "tp": "tensor parallelism",
    "dp": "data parallelism",
    "pp": "pipeline parallelism",
}
_TIME: Final = "iteration time (ms)"


@dataclass(frozen=True)
class Measured:
    """One row of a table in vTrain's format.

    Attributes
    ----------
    id : unique within the table
    gpus, global_batch, micro_batch, hidden, heads, layers, seq_len, tp, dp, pp : as the columns say
    time_s : of one iteration
    """

    id: str
    gpus: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    seq_len: int
    tp: int
    dp: int
    pp: int
    time_s: float

    @property
    def model(self) -> tuple[int, int, int, int]:
        """Sizes that make the model."""
        return self.hidden, self.heads, self.layers, self.seq_len

    @property
    def cell(self) -> tuple[int, int, int, int, int]:
        """What a layer's time depends on."""
        return self.hidden, self.heads, self.seq_len, self.tp, self.micro_batch

    @property
    def one_node(self) -> bool:
        """Whether the row belongs to the table of single nodes."""
        return self.gpus <= ONE_NODE

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one pipeline."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def work_s(self) -> float:
        """GPU seconds a sequence, bubble taken out: ``t m / (m + p - 1)`` GPUs / batch."""
        m = self.num_micro_batches
        return self.time_s * m / (m + self.pp - 1) * self.gpus / self.global_batch


@dataclass(frozen=True)
class Published:
    """One step printed in a paper.

    Attributes
    ----------
    id, group, model : of the row, its group, and the model's preset
    gpus, tp, pp, virtual, micro_batch, batch : layout; `virtual` stages a GPU
    recompute, split : what is rebuilt, and whether the sequence is split between tensor-parallel ranks
    value, unit : ``s``, ``TFLOP/s`` (Megatron-LM's count, a GPU) or ``MFU %``
    assumed : which of these the paper does not print
    """

    id: str
    group: str
    model: str
    gpus: int
    tp: int
    pp: int
    virtual: int
    micro_batch: int
    batch: int
    recompute: str
    split: bool
    value: float
    unit: str
    assumed: tuple[str, ...]


@dataclass(frozen=True)
class LayerTime:
    """Forward and backward of one layer, milliseconds as printed."""

    variant: str
    recompute: str
    split: bool
    forward_ms: float
    backward_ms: float


def bundled_text(name: str) -> str:
    """A bundled table of the suite."""
    return (bundled() / "tables" / "steps" / f"{name}.csv").read_text(encoding="utf-8")


def read_vtrain(text: str, name: str) -> list[Measured]:
    """Parse a table in vTrain's format; what stands above its header is skipped.

    Raises
    ------
    CalibrationError
        If a column is missing, a value is no positive number, or the degrees do not make the GPUs.
    """
    reader = csv.DictReader(io.StringIO(_uncommented(text)))
    missing = [column for column in (*_INTEGERS.values(), _TIME) if column not in (reader.fieldnames or ())]
    if missing:
        raise CalibrationError(
            f"{name} lacks column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
            f"expected {','.join((*_INTEGERS.values(), _TIME))}"
        )
    rows = [_measured(row, f"{name} line {reader.line_num}") for row in reader]
    if not rows:
        raise CalibrationError(f"{name} has no rows; expected at least one below the header")
    seen: Counter[str] = Counter()
    unique = []
    for row in rows:
        seen[row.id] += 1
        unique.append(row if seen[row.id] == 1 else replace(row, id=f"{row.id}#{seen[row.id]}"))
    return unique


def _uncommented(text: str) -> str:
    lines = text.lstrip("\ufeff").splitlines(keepends=True)
    # The header itself may begin with "# GPUs".
    header = next((number for number, line in enumerate(lines) if _TIME in line), 0)
    return "".join(lines[header:])


def _measured(row: dict[str, str], where: str) -> Measured:
    try:
        sizes = {field: int(row[column]) for field, column in _INTEGERS.items()}
        time_ms = float(row[_TIME])
    except (TypeError, ValueError) as error:
        raise CalibrationError(f"{where}: {error}; expected whole sizes and a time in ms") from None
    if min(sizes.values()) < 1 or not (math.isfinite(time_ms) and time_ms > 0):
        raise CalibrationError(f"{where}: a size is below 1 or the time not positive; expected positive numbers")
    if sizes["tp"] * sizes["dp"] * sizes["pp"] != sizes["gpus"]:
        raise CalibrationError(
            f"{where}: tensor x data x pipeline parallelism is {sizes['tp'] * sizes['dp'] * sizes['pp']}; expected "
            f"the {sizes['gpus']} GPUs"
        )
    label = (
        f"h{sizes['hidden']}-l{sizes['layers']}-gpus{sizes['gpus']}-batch{sizes['global_batch']}-tp{sizes['tp']}"
        f"-dp{sizes['dp']}-pp{sizes['pp']}-mb{sizes['micro_batch']}"
    )
    return Measured(label, **sizes, time_s=time_ms * 1e-3)


def marked(rows: Sequence[Measured]) -> set[str]:
    """Ids of rows that their measurements alone make suspect.

    `Measured.work_s` more than `SUSPECT` times the least of the rows with the same model and tensor parallelism: the
    layout without its bubble does not do so much less work. The rule was fixed before anything was predicted.
    """
    least: dict[object, float] = {}
    for row in rows:
        key = (row.model, row.tp)
        least[key] = min(least.get(key, math.inf), row.work_s)
    return {row.id for row in rows if row.work_s > SUSPECT * least[row.model, row.tp]}


def published_steps() -> list[Published]:
    """Bundled steps of papers."""
    rows = csv.DictReader(line for line in bundled_text("papers").splitlines() if not line.startswith("# "))
    return [
        Published(
            id=row["id"],
            group=row["group"],
            model=row["model"],
            gpus=int(row["gpus"]),
            tp=int(row["tp"]),
            pp=int(row["pp"]),
            virtual=int(row["virtual"]),
            micro_batch=int(row["micro_batch"]),
            batch=int(row["batch"]),
            recompute=row["recompute"],
            split=row["sp"] == "yes",
            value=float(row["value"]),
            unit=row["unit"],
            assumed=tuple(row["assumed"].split()),
        )
        for row in rows
    ]


def layer_times() -> list[LayerTime]:
    """Bundled times of one layer."""
    rows = csv.DictReader(line for line in bundled_text("korthikanti_layer").splitlines() if not line.startswith("# "))
    return [
        LayerTime(
            row["variant"], row["recompute"], row["sp"] == "yes", float(row["forward_ms"]), float(row["backward_ms"])
        )
        for row in rows
    ]
