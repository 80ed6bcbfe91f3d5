"""How one number of a profile is read: value, unit, source, layer, trust."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, get_args

from overlapsim.errors import UsageError
from overlapsim.hardware.profile import Layer, Source, Trust
from overlapsim.hardware.schema import TINY, Field
from overlapsim.units import parse_bandwidth_bytes_per_s, parse_bytes, parse_flop_per_s, parse_hz, parse_time_s

LEAF_KEYS: Final = ("value", "unit", "source", "layer", "trust", "note")
LAYERS: Final = get_args(Layer)
TRUSTS: Final = get_args(Trust)

_PHYSICAL: Final[Mapping[str, tuple[Callable[[str], float], str]]] = {
    "bandwidth": (parse_bandwidth_bytes_per_s, "2039 GB/s"),
    "bytes": (parse_bytes, "80 GB"),
    "time": (parse_time_s, "3.4 us"),
    "flop_rate": (parse_flop_per_s, "312 TFLOP/s"),
    "frequency": (parse_hz, "1410 MHz"),
}
_UNITS: Final = {"count": "count", "ratio": "ratio", "tiles": "elements", "groups": "devices", "pairs": "links"}


class QuantityError(Exception):
    """Why one quantity could not be read; the reader adds where it stands."""


def read_source(leaf: Mapping[str, Any], origin: str) -> Source:
    """Source of a quantity or table; what it leaves out makes it an override by the file it stands in.

    Raises
    ------
    QuantityError
        If layer, trust or source are not what they may be.
    """
    layer, trust = leaf.get("layer", "override"), leaf.get("trust", "medium")
    if layer not in LAYERS:
        raise QuantityError(f"layer is {layer!r}; expected one of {', '.join(LAYERS)}")
    if trust not in TRUSTS:
        raise QuantityError(f"trust is {trust!r}; expected one of {', '.join(TRUSTS)}")
    reference = leaf.get("source", origin)
    if not isinstance(reference, str) or not reference:
        raise QuantityError(f"source is {reference!r}; expected a code of SOURCES.md or a file name")
    return Source(layer, reference, trust)


def read_quantity(entry: Any, field: Field, origin: str) -> tuple[Any, Source]:
    """Value in SI units and source of one entry: a mapping, or for a user's own figure just ``2.0 TB/s``.

    Raises
    ------
    QuantityError
        If a key is unknown, the value is of another type or unit, or outside the field's limits.
    """
    leaf = entry if isinstance(entry, dict) else {"value": entry}
    unknown = sorted(str(key) for key in leaf if key not in LEAF_KEYS)
    if unknown:
        raise QuantityError(f"unknown key {', '.join(unknown)}; expected {', '.join(LEAF_KEYS)}")
    if "value" not in leaf:
        raise QuantityError("has no value")
    value = _VALUE_READERS[field.dimension](leaf, field)
    return value, read_source(leaf, origin)


def _physical(leaf: Mapping[str, Any], field: Field) -> float:
    parse, example = _PHYSICAL[field.dimension]
    value, unit = leaf["value"], leaf.get("unit", "")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise QuantityError(f"is {value!r}; expected a quantity such as {example}")
    text = f"{value} {unit}".strip()
    if not any(character.isalpha() for character in text.lower().replace("e", "")):
        raise QuantityError(f"is {text} without a unit; expected a quantity such as {example}")
    try:
        return _limited(parse(text), field, text)
    except UsageError as error:
        raise QuantityError(str(error)) from None


def _number(leaf: Mapping[str, Any], field: Field) -> float:
    _check_unit(leaf, field)
    value = leaf["value"]
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        number = float(value)
        if field.dimension == "count" and number != int(number):
            raise ValueError
    except (ValueError, OverflowError):
        kind = "a whole number" if field.dimension == "count" else "a number"
        raise QuantityError(f"is {value!r}; expected {kind}") from None
    number = _limited(number, field, str(value))
    return int(number) if field.dimension == "count" else number


def _limited(value: float, field: Field, text: str) -> float:
    if not (math.isfinite(value) and field.low <= value <= field.high):
        low = "above 0" if field.low == TINY else f"at least {field.low:g}"
        high = "" if field.high == math.inf else f" and at most {field.high:g}"
        raise QuantityError(f"is {text}; expected {low}{high}")
    return value


def _tiles(leaf: Mapping[str, Any], field: Field) -> tuple[tuple[int, ...], ...]:
    tiles = _int_rows(leaf, field, "a list of [BM, BN, BK]")
    if not tiles or any(len(tile) != 3 or min(tile) < 1 for tile in tiles):
        raise QuantityError(f"is {leaf['value']!r}; expected a list of [BM, BN, BK], each above 0")
    return tiles


def _groups(leaf: Mapping[str, Any], field: Field) -> tuple[tuple[int, ...], ...]:
    return _int_rows(leaf, field, "a list of device lists such as [[0, 1], [2, 3]]")


def _pairs(leaf: Mapping[str, Any], field: Field) -> tuple[tuple[int, ...], ...]:
    expected = "a list of [GPU, GPU, links] such as [[0, 1, 2]]"
    pairs = _int_rows(leaf, field, expected)
    if any(len(pair) != 3 or pair[0] == pair[1] or min(pair[:2]) < 0 or pair[2] < 1 for pair in pairs):
        raise QuantityError(f"is {leaf['value']!r}; expected {expected}, of two GPUs and at least 1 link each")
    if len({frozenset(pair[:2]) for pair in pairs}) < len(pairs):
        raise QuantityError(f"is {leaf['value']!r}; expected each two GPUs once")
    return pairs


def _int_rows(leaf: Mapping[str, Any], field: Field, expected: str) -> tuple[tuple[int, ...], ...]:
    _check_unit(leaf, field)
    rows = leaf["value"]
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and row and all(type(cell) is int for cell in row) for row in rows
    ):
        raise QuantityError(f"is {rows!r}; expected {expected}")
    return tuple(tuple(row) for row in rows)


def _check_unit(leaf: Mapping[str, Any], field: Field) -> None:
    unit = leaf.get("unit", _UNITS[field.dimension])
    if unit != _UNITS[field.dimension]:
        raise QuantityError(f"has unit {unit!r}; expected {_UNITS[field.dimension]}")


_VALUE_READERS: Final[Mapping[str, Callable[[Mapping[str, Any], Field], Any]]] = {
    **dict.fromkeys(_PHYSICAL, _physical),
    "count": _number,
    "ratio": _number,
    "tiles": _tiles,
    "groups": _groups,
    "pairs": _pairs,
}
