"""Fit files: constants of cost models for one device or cluster, with what they were fitted on."""

from __future__ import annotations

import math
from typing import Any, Final

from overlapsim.errors import UsageError
from overlapsim.hardware.documents import Document
from overlapsim.hardware.profile import Fit
from overlapsim.hardware.quantity import QuantityError, read_source
from overlapsim.units import parse_bandwidth_bytes_per_s, parse_bytes, parse_flop_per_s, parse_hz, parse_time_s

TOP_KEYS: Final = ("kind", "family", "of", "notes", "fits")
FIT_KEYS: Final = ("source", "layer", "trust", "num_points", "notes", "spread", "parameters")
PLAIN_UNITS: Final = ("ratio", "count")
"""Units of what has no dimension."""
# The first suffix that fits decides; a unit with none of them is a time.
_PARSERS: Final = (
    ("FLOP/s", parse_flop_per_s),
    ("/s", parse_bandwidth_bytes_per_s),
    ("Hz", parse_hz),
    ("B", parse_bytes),
    ("", parse_time_s),
)


def read_fits(document: Document, of: str | None = None) -> tuple[dict[str, Fit], list[str]]:
    """Fits of one file by ``family.key``, and what is wrong with it.

    Parameters
    ----------
    document : Document
        A file of ``kind: fit``.
    of : str, optional
        Name of the device or cluster it must belong to.

    Returns
    -------
    fits : dict of str to Fit
        Those without a problem.
    problems : list of str
        Each with the file and the place.
    """
    data, problems = document.data, list[str]()
    where = f"fit {document.name} ({document.label})"
    if data.get("kind") != "fit":
        return {}, [f"{where}: kind is {data.get('kind')!r}; expected kind: fit"]
    problems += [f"unknown key {key}; expected {', '.join(TOP_KEYS)}" for key in data if key not in TOP_KEYS]
    family, owner, entries = data.get("family"), data.get("of"), data.get("fits")
    for key, value in (("family", family), ("of", owner)):
        if not isinstance(value, str) or not value:
            problems.append(f"{key} is {value!r}; expected a name")
    if of is not None and owner != of:
        problems.append(f"of is {owner!r}; the file lies where {of}'s is expected")
    if not isinstance(entries, dict) or not entries:
        problems.append(f"fits is {entries!r}; expected a section of keys such as bf16")
        entries = {}
    fits: dict[str, Fit] = {}
    for key, entry in entries.items():
        try:
            fits[f"{family}.{key}"] = _fit(str(family), str(key), entry, f"{document.name}.yaml")
        except QuantityError as error:
            problems.append(f"fits.{key} {error}")
    return fits, [f"{where}: {problem}" for problem in problems]


def _fit(family: str, key: str, entry: Any, origin: str) -> Fit:
    if not isinstance(entry, dict):
        raise QuantityError(f"is {entry!r}; expected a mapping of {', '.join(FIT_KEYS)}")
    unknown = [str(name) for name in entry if name not in FIT_KEYS]
    if unknown:
        raise QuantityError(f"has unknown key {', '.join(unknown)}; expected {', '.join(FIT_KEYS)}")
    parameters, spread = entry.get("parameters"), entry.get("spread") or {}
    if not isinstance(parameters, dict) or not parameters:
        raise QuantityError("has no parameters; expected {name: {value, unit}, ...}")
    if not isinstance(spread, dict):
        raise QuantityError(f"spread is {spread!r}; expected regimes such as {{small: [0.9, 1.1]}}")
    count = entry.get("num_points", 0)
    if type(count) is not int or count < 0:
        raise QuantityError(f"num_points is {count!r}; expected a whole number, 0 for a prior")
    return Fit(
        family=family,
        key=key,
        parameters={str(name): _parameter(str(name), leaf) for name, leaf in parameters.items()},
        source=read_source(entry, origin),
        num_points=count,
        spread={str(regime): _range(str(regime), limits) for regime, limits in spread.items()},
        notes=str(entry.get("notes", "")),
    )


def _parameter(name: str, leaf: Any) -> float:
    if not isinstance(leaf, dict) or set(leaf) != {"value", "unit"}:
        raise QuantityError(f"parameters.{name} is {leaf!r}; expected {{value: NUMBER, unit: UNIT}}")
    value, unit = leaf["value"], leaf["unit"]
    # YAML reads 1e-6 as text: only numbers with a point and a signed exponent are numbers to it.
    number = _number(value)
    if number is None:
        raise QuantityError(f"parameters.{name} is {value!r}; expected a finite number")
    if unit in PLAIN_UNITS:
        return number
    try:
        if not isinstance(unit, str) or not unit:
            raise UsageError(f"unit is {unit!r}")
        return next(parse for suffix, parse in _PARSERS if unit.endswith(suffix))(f"{number!r} {unit}")
    except UsageError as error:
        raise QuantityError(f"parameters.{name}: {error}, or {' or '.join(PLAIN_UNITS)}") from None


def _range(regime: str, limits: Any) -> tuple[float, float]:
    numbers = [_number(limit) for limit in limits] if isinstance(limits, list) else []
    match numbers:
        case [float() as low, float() as high] if 0 < low <= high:
            return low, high
    raise QuantityError(f"spread.{regime} is {limits!r}; expected [low, high] of measured over predicted, above 0")


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
