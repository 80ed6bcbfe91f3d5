"""Bundled tables of the suite ``operators``, their committed split and the fits made from its fitted half."""

from __future__ import annotations

import hashlib
import importlib.resources
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import yaml

from overlapsim.calibration.fit_operators import LEAST_POINTS, fit_works
from overlapsim.calibration.operator_models import group_works
from overlapsim.calibration.operator_rows import UNFUSED, Work
from overlapsim.calibration.operator_tables import TableRow, digest, parse_table, to_seconds
from overlapsim.errors import CalibrationError
from overlapsim.hardware.catalogue import bundled
from overlapsim.hardware.profile import DeviceSpec, Fit, Source

SOURCES: Final = {
    "aic": "AIC-ATTENTION",
    "infersim": "INFERSIM",
    "vidur": "VIDUR",
    "simumax": "SIMUMAX",
    "flashattention": "FA3",
    "llmcompass": "LLMCOMPASS",
    "deepgemm": "DEEPGEMM",
    "torchao": "TORCHAO",
}
"""Code in hwprofiles/SOURCES.md by the first word of a table's name."""


@dataclass(frozen=True)
class Split:
    """The committed split file.

    Attributes
    ----------
    fitted, cross_check : bundled tables of which half, or nothing, went into fits
    devices : device profile by word in a table's name
    text : the file, for its hash
    """

    fitted: tuple[str, ...]
    cross_check: tuple[str, ...]
    devices: Mapping[str, str]
    text: str

    def device_name(self, table: str) -> str:
        """Profile that a table was measured on.

        Raises
        ------
        CalibrationError
            If no known word is in the table's name.
        """
        words = [word for word in self.devices if f"_{word}_" in f"_{table}_"]
        if not words:
            raise CalibrationError(f"table {table} names no known device; expected one of {', '.join(self.devices)}")
        return self.devices[max(words, key=len)]

    @cached_property
    def rows(self) -> tuple[TableRow, ...]:
        """All bundled rows."""
        folder = bundled() / "tables" / "operators"
        tables = ((folder / f"{name}.csv").read_text(encoding="utf-8") for name in (*self.fitted, *self.cross_check))
        parsed = zip((*self.fitted, *self.cross_check), tables, strict=True)
        return tuple(row for name, text in parsed for row in parse_table(text, name))

    def sha256(self) -> str:
        """Of the split file and of which row is in which half."""
        return hashlib.sha256((self.text + digest(self.rows)).encode()).hexdigest()

    def is_fitted(self, row: TableRow) -> bool:
        """Whether a row, bundled or not, is one that fits used."""
        return row.table in self.fitted and row.fitted and row.id in self._ids

    @cached_property
    def _ids(self) -> frozenset[str]:
        return frozenset(row.id for row in self.rows)


def load_split() -> Split:
    """The committed split."""
    text = (importlib.resources.files("overlapsim.accuracy") / "splits" / "operators.yaml").read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    return Split(tuple(data["fitted"]), tuple(data["cross_check"]), dict(data["devices"]), text)


def refit(split: Split, device: DeviceSpec, rows: Sequence[TableRow] | None = None) -> list[Fit]:
    """Every fit of a device from the fitted half of its bundled tables; what the files in hwprofiles/fits hold.

    Parameters
    ----------
    split : the committed split
    device : its profile; fits that it has already are not looked at
    rows : rows to fit on instead (tests)

    Returns
    -------
    list of Fit
        Keys with at least four points, in order of first appearance.
    """
    chosen = [row for row in split.rows if split.is_fitted(row)] if rows is None else rows
    members: dict[tuple[str, str], list[tuple[TableRow, Work]]] = defaultdict(list)
    for row in chosen:
        if split.device_name(row.table) == device.name:
            work = row.work()
            if work.key == UNFUSED:
                continue
            key = group_works([work])[0].key
            members[key.family, key.key].append((row, work))
    fits = []
    for pairs in members.values():
        if len(pairs) < LEAST_POINTS:
            continue
        tables = dict.fromkeys(row.table for row, _ in pairs)
        codes = dict.fromkeys(SOURCES[table.split("_")[0]] for table in tables)
        times = [to_seconds(row.value, row.unit, work) for row, work in pairs]
        half = digest([row for row, _ in pairs])[:16]
        notes = f"tables {', '.join(tables)}; fitted half {half} of accuracy/splits/operators.yaml"
        source = Source("derived", " ".join(codes), "high")
        fits.append(fit_works(device, [work for _, work in pairs], times, source, notes))
    return fits
