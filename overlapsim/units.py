"""The only place that knows prefixes: text with a unit in, SI floats out, and back for people."""

from __future__ import annotations

import math
import re

from overlapsim.errors import UsageError

PS_PER_S = 10**12
MAX_UNIT_PS = 2**46
"""Longest time of one unit, launch or lag in picoseconds (about 70 s; engine contract, section 3.6)."""

_MOST_DIGITS = 18

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "ps": 1e-12}
_QUANTITY = re.compile(r"^\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-z/]*)\s*$")

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
"""Bytes an element occupies in memory, by the name used everywhere in overlapsim."""


def ps_from_s(seconds: float) -> int:
    """Picoseconds nearest to `seconds`, at least 1: the engine's rounding rule.

    Parameters
    ----------
    seconds : float
        Duration in seconds, finite and >= 0, at most 70 s.

    Raises
    ------
    UsageError
        If `seconds` is not finite, negative, or too long for the engine.

    Examples
    --------
    >>> ps_from_s(1.5e-6)
    1500000
    """
    if not math.isfinite(seconds) or seconds < 0:
        raise UsageError(f"duration is {seconds!r} s; expected a finite time >= 0")
    ps = max(1, math.floor(seconds * 1e12 + 0.5))
    if ps > MAX_UNIT_PS:
        raise UsageError(f"duration is {seconds:.6g} s; the engine takes at most {MAX_UNIT_PS / 1e12:.3g} s a unit")
    return ps


def s_from_ps(ps: int) -> float:
    """Seconds of `ps` picoseconds."""
    return ps / 1e12


def _split(text: str | float, expected: str) -> tuple[float, str]:
    match = _QUANTITY.match(str(text))
    if match is None:
        raise UsageError(f"{text!r} is not a quantity; expected {expected}")
    return float(match.group(1)), match.group(2)


def parse_time_s(text: str | float) -> float:
    """Seconds of a text such as ``"2.36ms"``, ``"62 us"`` or a bare number of seconds.

    Raises
    ------
    UsageError
        If the text has no number or a unit other than s, ms, us, ns, ps.

    Examples
    --------
    >>> parse_time_s("2.5ms")
    0.0025
    """
    value, unit = _split(text, "a time such as 2.36e-3, 2.36ms or 62us")
    if unit and unit not in _TIME:
        raise UsageError(f"{text!r} has unit {unit!r}; expected a time in s, ms, us, ns or ps")
    return value * _TIME[unit or "s"]


def parse_bytes(text: str | float) -> float:
    """Bytes of a text such as ``"80GB"`` (decimal), ``"75GiB"`` (binary) or a bare number of bytes.

    Raises
    ------
    UsageError
        If the unit is not B with a decimal or binary prefix; bits are refused.

    Examples
    --------
    >>> parse_bytes("2 GiB")
    2147483648.0
    """
    value, unit = _split(text, "a size such as 80GB, 75GiB or 1048576")
    prefix = unit.removesuffix("B")
    if unit and (prefix == unit or prefix not in _DECIMAL | _BINARY):
        raise UsageError(f"{text!r} has unit {unit!r}; expected bytes such as KB, MiB or GB (not bits)")
    return value * (_DECIMAL | _BINARY)[prefix]


def parse_bandwidth_bytes_per_s(text: str | float) -> float:
    """Bytes per second of a text such as ``"25GB/s"`` or ``"200Gb/s"`` (bits, divided by eight).

    Raises
    ------
    UsageError
        If the unit is not B/s or b/s with a prefix.

    Examples
    --------
    >>> parse_bandwidth_bytes_per_s("200Gb/s")
    25000000000.0
    """
    value, unit = _split(text, "a bandwidth such as 25GB/s or 200Gb/s")
    per_bit = 1.0
    prefix = ""
    if unit:
        base = unit.removesuffix("/s")
        prefix = base[:-1]
        if base == unit or base[-1:] not in ("B", "b") or prefix not in _DECIMAL | _BINARY:
            raise UsageError(f"{text!r} has unit {unit!r}; expected bytes or bits per second such as GB/s or Gb/s")
        per_bit = 0.125 if base[-1] == "b" else 1.0
    return value * (_DECIMAL | _BINARY)[prefix] * per_bit


def parse_flop_per_s(text: str | float) -> float:
    """Floating-point operations per second of a text such as ``"312 TFLOP/s"`` or a bare number.

    Raises
    ------
    UsageError
        If the unit is not FLOP/s with a decimal prefix.

    Examples
    --------
    >>> parse_flop_per_s("312 TFLOP/s")
    312000000000000.0
    """
    return _parse_decimal(text, "FLOP/s", "a rate such as 312 TFLOP/s")


def parse_hz(text: str | float) -> float:
    """Hertz of a text such as ``"1410 MHz"`` or a bare number.

    Raises
    ------
    UsageError
        If the unit is not Hz with a decimal prefix.

    Examples
    --------
    >>> parse_hz("1410 MHz")
    1410000000.0
    """
    return _parse_decimal(text, "Hz", "a frequency such as 1410 MHz")


def _parse_decimal(text: str | float, base: str, expected: str) -> float:
    value, unit = _split(text, expected)
    prefix = unit.removesuffix(base)
    if unit and (prefix == unit or prefix not in _DECIMAL):
        raise UsageError(f"{text!r} has unit {unit!r}; expected {expected}")
    return value * _DECIMAL[prefix]


def whole_number(text: str) -> int | None:
    """Whole number from 0 that a text is; None for anything else, and for more digits than any size here has.

    Examples
    --------
    >>> whole_number(" 24 "), whole_number("-1"), whole_number("9" * 5000)
    (24, None, None)
    """
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def dtype_bytes(dtype: str) -> int:
    """Bytes per element of `dtype`.

    Raises
    ------
    UsageError
        If the name is unknown.
    """
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        raise UsageError(f"dtype {dtype!r} is unknown; expected one of {', '.join(sorted(DTYPE_BYTES))}") from None


def format_time(seconds: float) -> str:
    """Three significant digits with a fitting unit, for people.

    Examples
    --------
    >>> format_time(0.0025491)
    '2.55 ms'
    """
    return _format(seconds, [("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9), ("ps", 1e-12)])


def format_bytes(size_bytes: float) -> str:
    """Three significant digits in binary units, for people.

    Examples
    --------
    >>> format_bytes(134217728)
    '128 MiB'
    """
    return _format(size_bytes, [("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0)])


def format_bandwidth(bandwidth_bytes_per_s: float) -> str:
    """Three significant digits in decimal units, for people.

    Examples
    --------
    >>> format_bandwidth(2.039e12)
    '2.04 TB/s'
    """
    return _format(bandwidth_bytes_per_s, [("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("B/s", 1.0)])


def format_rate(value: float, unit: str) -> str:
    """Three significant digits of a decimal quantity such as FLOP/s or Hz, for people.

    Examples
    --------
    >>> format_rate(312e12, "FLOP/s")
    '312 TFLOP/s'
    """
    return _format(value, [(prefix + unit, _DECIMAL[prefix]) for prefix in ("P", "T", "G", "M", "k", "")])


def format_parameter(name: str, value: object) -> str:
    """A strategy's parameter for people: bytes with their unit, all else as it is.

    Examples
    --------
    >>> format_parameter("bucket_bytes", 26214400.0), format_parameter("pending", 2)
    ('bucket 25.0 MiB', 'pending 2')
    """
    if name.endswith("_bytes") and isinstance(value, int | float):
        return f"{name.removesuffix('_bytes')} {format_bytes(value)}"
    return f"{name} {value}"


def _format(value: float, units: list[tuple[str, float]]) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {units[0][0] if value else units[-1][0]}"
    # 0.9995: what would print as 1000 of a unit prints as 1.00 of the next.
    name, scale = next((unit for unit in units if abs(value) >= unit[1] * 0.9995), units[-1])
    scaled = float(f"{value / scale:.3g}")
    digits = max(0, 2 - math.floor(math.log10(abs(scaled)) + 1e-9))
    return f"{scaled:.{digits}f} {name}"
