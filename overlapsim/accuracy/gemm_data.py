"""Tables and splits of the suite ``gemm``: the committed rules and constants, and tables given with ``--data``."""

from __future__ import annotations

import csv
import importlib.resources
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from overlapsim.cost.gemm_fitted import FAMILY, GemmRows, bundled_rows
from overlapsim.errors import CalibrationError
from overlapsim.hardware.loading import list_profiles, load_device
from overlapsim.hardware.profile import DeviceSpec, Fit, Source

DTYPES: Final[Mapping[str, str]] = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "half": "fp16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "float8_e4m3fn": "fp8",
    "nvfp4": "fp4",
    "fp4": "fp4",
}
COLUMNS: Final = ("source_table", "dtype", "m", "n", "k", "time_us")
# Words of a table's name that say which of several boards of one chip it was.
BOARDS: Final = ("server", "ada")


@dataclass(frozen=True)
class Splits:
    """Committed rules, and the constants fitted by them.

    Attributes
    ----------
    rules : content of ``splits/gemm.yaml``
    fits : by (device, dtype, split)
    """

    rules: Mapping[str, Any]
    fits: Mapping[tuple[str, str, str], Fit]

    def is_warm(self, device: str) -> bool:
        """The benchmark of that table left weights in L2."""
        return bool(self.rules["tables"].get(device, {}).get("warm", False))


def split_files() -> list[Path]:
    """The committed files, whose hash names the split."""
    folder = importlib.resources.files("overlapsim.accuracy") / "splits"
    return [Path(str(folder / name)) for name in ("gemm.yaml", "gemm_fits.csv")]


def load_splits() -> Splits:
    """Read the committed split files."""
    rules_file, fits_file = split_files()
    lines = [line for line in fits_file.read_text("utf-8").splitlines() if not line.startswith("#")]
    fits = {}
    for row in csv.DictReader(lines):
        device, dtype, split, count = (row.pop(name) for name in ("device", "dtype", "split", "num_points"))
        parameters = {name: float(value) for name, value in row.items()}
        source = Source("measured", f"gemm/{device}.csv")
        fits[device, dtype, split] = Fit(FAMILY, dtype, parameters, source, int(count))
    return Splits(yaml.safe_load(rules_file.read_text("utf-8")), fits)


@dataclass(frozen=True, eq=False)
class GivenTable:
    """Rows of one table and dtype of a file given with ``--data``.

    Attributes
    ----------
    name : ``source_table``
    dtype : as overlapsim spells it, or as given if unknown
    device : name of the profile; None if none fits the table's name
    rows : shapes and times
    """

    name: str
    dtype: str
    device: str | None
    rows: GemmRows

    @property
    def is_linear(self) -> bool:
        """Tables named ``aic_...`` time linear layers, quantising included; others time kernels."""
        return self.name.startswith("aic_")


def read_given(file: Path) -> list[GivenTable]:
    """Tables of a CSV with columns ``source_table,dtype,m,n,k,time_us``.

    Raises
    ------
    CalibrationError
        If the file cannot be read, lacks columns, or a row holds no positive numbers.
    """
    try:
        lines = [line for line in file.read_text("utf-8-sig").splitlines() if line and not line.startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{file} cannot be read as UTF-8 text: {error}") from None
    reader = csv.DictReader(lines)
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise CalibrationError(f"{file} lacks {', '.join(missing)}; expected columns {','.join(COLUMNS)}")
    found: dict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
    for number, row in enumerate(reader, start=2):
        try:
            values = tuple(float(row[name]) for name in COLUMNS[2:])
        except (TypeError, ValueError):
            values = (-1.0,)
        if not all(np.isfinite(value) and value > 0 for value in values):
            raise CalibrationError(f"{file}, line {number}: expected sizes and a time above 0, got {dict(row)}")
        found[str(row["source_table"]), str(row["dtype"]).strip().lower()].append(values)
    return [
        GivenTable(name, DTYPES.get(dtype, dtype), device_of(name), _rows(values))
        for (name, dtype), values in found.items()
    ]


def device_of(table: str) -> str | None:
    """Profile whose chip a table's name has as a word; of several boards the one named, else one with a table.

    Examples
    --------
    >>> device_of("aic_h200_sxm_gemm"), device_of("cublaslt_azure_a100_fp16"), device_of("some_h900_gemm")
    ('h200-sxm-141gb', 'a100-sxm4-80gb', None)
    """
    name = f"-{re.sub(r'[^a-z0-9]+', '-', table.lower())}-"
    best: tuple[tuple[int, int, int], str] | None = None
    for profile in list_profiles("device"):
        parts = profile.split("-")
        # The chips of rtx-4090 and rtx-pro-6000-server have several words, that of h100-sxm5-80gb one.
        chip = "-".join(part for part in parts if part not in BOARDS) if parts[0] == "rtx" else parts[0]
        if f"-{chip}-" not in name:
            continue
        named = sum(f"-{part.rstrip('0123456789') if part.startswith('sxm') else part}" in name for part in parts[1:])
        other = sum(part in ("pcie", "nvl") and f"-{part}-" not in name for part in parts)
        rank = (named - other, int(bundled_rows(f"gemm/{profile}.csv", "bf16") is not None), int("80gb" in parts))
        if best is None or rank > best[0]:
            best = (rank, profile)
    return None if best is None else best[1]


@lru_cache
def device(name: str) -> DeviceSpec:
    """A bundled device, loaded once."""
    return load_device(name)


def bundled_tables(splits: Splits) -> Iterator[tuple[str, str, GemmRows]]:
    """(device, dtype, rows) of every bundled table that a fit was made from."""
    for name in splits.rules["tables"]:
        for dtype in ("bf16", "fp8", "fp4"):
            rows = bundled_rows(f"gemm/{name}.csv", dtype)
            if rows is not None and (name, dtype, "hashed") in splits.fits:
                yield name, dtype, rows


def _rows(values: list[tuple[float, ...]]) -> GemmRows:
    columns = np.array(values).T
    return GemmRows(columns[0], columns[1], columns[2], columns[3] * 1e-6)
