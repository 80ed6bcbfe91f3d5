"""Tables of the suite ``collectives``: the bundled ones with their split, and a table of your own."""

from __future__ import annotations

import csv
import hashlib
import importlib.resources
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from overlapsim.calibration.fit_collective import CollectiveRow
from overlapsim.errors import CalibrationError
from overlapsim.hardware.catalogue import bundled
from overlapsim.hardware.profile import CurveKey, CurveTable, Source

HEADER: Final = ("source_table", "hardware", "nodes", "ranks", "collective", "size_bytes", "time_us")
OPTIONAL: Final = ("cluster", "floor_us", "dtype")
_SPELLINGS: Final[Mapping[str, str]] = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
    "broadcast": "broadcast",
}
_BAD: Final = ("degraded", "tcp_fallback", "unspecified")
# Words in a description of hardware -> bundled cluster; the first that fits decides.
_CLUSTERS: Final[tuple[tuple[str, str], ...]] = (
    (r"gb300", "gb300-nvl72"),
    (r"gb200", "gb200-nvl72"),
    (r"gh200", "gh200-quad4"),
    (r"b300.*p6", "b300-sxm8-p6"),
    (r"b300", "b300-sxm8"),
    (r"b200.*p6", "b200-sxm8-p6"),
    (r"b200", "b200-sxm8"),
    (r"h200.*p5en", "h200-sxm8-p5en"),
    (r"h200", "h200-sxm8"),
    (r"h100.*a3.?mega", "h100-sxm8-a3-mega"),
    (r"h100.*a3", "h100-sxm8-a3-high"),
    (r"h100.*(p5|efa)", "h100-sxm8-p5"),
    (r"h100.*nvl\b", "h100-nvl8"),
    (r"h100.*pcie", "h100-pcie8"),
    (r"h100", "h100-sxm8"),
    (r"h800", "h800-sxm8"),
    (r"h20", "h20-sxm8"),
    (r"a800", "a800-sxm8"),
    (r"a100.*(polaris|x4|mesh|slingshot)", "a100-polaris4"),
    (r"a100.*p4de", "a100-sxm8-p4de"),
    (r"a100.*p4d", "a100-40gb-sxm8-p4d"),
    (r"a100.*pcie", "a100-pcie8"),
    (r"a100.*40", "a100-40gb-sxm8"),
    (r"a100", "a100-sxm8"),
    (r"l40s", "l40s-pcie8"),
    (r"pro.?6000", "rtx-pro-6000-pcie8"),
    (r"5090", "rtx5090-pcie8"),
    (r"4090", "rtx4090-pcie8"),
    (r"mi300x", "mi300x8"),
    (r"mi325x", "mi325x8"),
    (r"mi355x", "mi355x8"),
    (r"v100", "v100-dgx1"),
)


@dataclass(frozen=True)
class Measured:
    """One row of a user's table.

    Attributes
    ----------
    table, hardware, cluster : where it comes from; `cluster` is a profile, given or recognised, "" if neither
    row : what was measured; its time is NaN where it is to be predicted only
    floor_s : the site's floor, NaN if not given
    line : in the file
    """

    table: str
    hardware: str
    cluster: str
    row: CollectiveRow
    floor_s: float
    line: int


def load_split() -> tuple[dict[str, Any], str]:
    """The committed split and the SHA-256 of its file."""
    text = (importlib.resources.files("overlapsim.accuracy") / "splits" / "collectives.yaml").read_text("utf-8")
    return yaml.safe_load(text), hashlib.sha256(text.encode()).hexdigest()


def bundled_rows(table: str, dtype: str | None = None) -> list[CollectiveRow]:
    """Rows of a bundled table, those of one element type if the table has several.

    Raises
    ------
    CalibrationError
        If the table is not bundled or is one that must not be used.
    """
    refuse_bad(table)
    path = bundled() / "tables" / "collective" / f"{table}.csv"
    if not path.is_file():
        raise CalibrationError(f"table {table} is not bundled; expected {path}")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    read = list(csv.DictReader(lines))
    types = {row["dtype"] for row in read}
    keep = dtype if dtype in types else None
    return [
        CollectiveRow(
            row["collective"], int(row["ranks"]), int(row["nodes"]), float(row["size_bytes"]), _us(row["time_us"])
        )
        for row in read
        if keep is None or row["dtype"] == keep
    ]


def refuse_bad(table: str) -> None:
    """Refuse tables that are known to be broken.

    Raises
    ------
    CalibrationError
        If the name says degraded, tcp_fallback or unspecified.
    """
    for word in _BAD:
        if word in table:
            raise CalibrationError(f"table {table} is named {word}: such tables are never fitted on nor scored")


def curves_of(rows: Sequence[CollectiveRow], source: str) -> dict[CurveKey, CurveTable]:
    """Curves of rows, one for each collective, ranks and nodes."""
    points: dict[CurveKey, dict[float, float]] = {}
    for row in rows:
        points.setdefault(CurveKey(row.kind, row.ranks, row.nodes), {})[row.size_bytes] = row.time_s
    return {
        key: CurveTable(tuple(sorted(found)), tuple(found[size] for size in sorted(found)), Source("measured", source))
        for key, found in points.items()
    }


def recognise(hardware: str) -> str:
    """Bundled cluster that a description of hardware names, "" for none.

    Examples
    --------
    >>> recognise("H100-80GB SXM5, AWS p5.48xlarge, 32x100G EFA"), recognise("TPU v9")
    ('h100-sxm8-p5', '')
    """
    text = hardware.lower()
    return next((cluster for pattern, cluster in _CLUSTERS if re.search(pattern, text)), "")


def read_data(path: Path) -> list[Measured]:
    """Read a table in the suite's format.

    Columns ``source_table hardware nodes ranks collective size_bytes time_us``, optional ``cluster`` (a profile name
    or file), ``floor_us`` (least time of any message at that site) and ``dtype``; a blank time is predicted only.

    Raises
    ------
    CalibrationError
        If the file cannot be read as such; the message names line and column.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"table {path} cannot be read: {error}; expected CSV with {','.join(HEADER)}") from None
    reader = csv.DictReader(io.StringIO(text))
    names = [name.strip() for name in reader.fieldnames or ()]
    if missing := [name for name in HEADER if name not in names]:
        raise CalibrationError(f"table {path} has no column {', '.join(missing)}; expected {','.join(HEADER)}")
    found = [_measured(path, number, row) for number, row in enumerate(reader, start=2)]
    if not found:
        raise CalibrationError(f"table {path} has a header and no rows")
    return found


def _measured(path: Path, line: int, row: Mapping[str, str | None]) -> Measured:
    cells = {name.strip(): (value or "").strip() for name, value in row.items() if name is not None}

    def number(name: str, least: float) -> float:
        try:
            value = float(cells[name])
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < least:
            raise CalibrationError(
                f"table {path}, line {line}: {name} is {cells[name]!r}; expected a number >= {least:g}"
            )
        return value

    spelled = cells["collective"].lower().replace("_", "").replace("-", "").replace(" ", "")
    if spelled not in _SPELLINGS:
        raise CalibrationError(
            f"table {path}, line {line}: collective is {cells['collective']!r}; expected one of "
            f"{', '.join(_SPELLINGS.values())}"
        )
    time_s = number("time_us", 1e-9) * 1e-6 if cells["time_us"] else math.nan
    floor_s = number("floor_us", 0.0) * 1e-6 if cells.get("floor_us") else math.nan
    cell = CollectiveRow(
        _SPELLINGS[spelled], int(number("ranks", 2)), int(number("nodes", 1)), number("size_bytes", 1), time_s
    )
    cluster = cells.get("cluster") or recognise(cells["hardware"])
    return Measured(cells["source_table"], cells["hardware"], cluster, cell, floor_s, line)


def _us(text: str) -> float:
    return float(text) * 1e-6
