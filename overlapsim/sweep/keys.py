"""What the points of a sweep are given: keys of a spec, how their values are read, and the columns they fill."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from overlapsim.errors import OverlapSimError, UsageError
from overlapsim.plan import Finding

Cell = str | int | float | bool | None
"""One value of a row; None where there is none."""
Type = Literal["text", "int", "float", "bool"]
_PLAIN: Final[dict[Type, type[str] | type[int] | type[float]]] = {"text": str, "int": int, "float": float, "bool": bool}
REQUIRED: Final = object()
"""Default of a key that every point must have."""


class _UnexpectedError(ValueError):
    """A value that a key does not take; the message is what it takes."""


@dataclass(frozen=True)
class Column:
    """One column of the results: its name, with the unit, and the type of its cells."""

    name: str
    type: Type

    def cell(self, value: Cell) -> Cell:
        """The value as a plain one of the column's type: arrays give numbers of their own."""
        return None if value is None else _PLAIN[self.type](value)


@dataclass(frozen=True)
class Key:
    """One key of a spec.

    Attributes
    ----------
    name : as the option of the command is called, with underscores
    type : of its value as read
    read : from what YAML holds to the value; raises where it is none
    default : value where the key is left out; `REQUIRED` where it may not be
    column : of the results, where that is not the name of the key
    """

    name: str
    type: Type
    read: Callable[[Any], Cell]
    default: Any = REQUIRED
    column: str = ""

    @property
    def as_column(self) -> Column:
        """Column that the values fill."""
        return Column(self.column or self.name, self.type)


def text_key(name: str, default: Any = REQUIRED, *, check: Callable[[str], object] | None = None) -> Key:
    """A text of one line that `check` accepts without an error; an empty one is not checked."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or "\n" in value:
            raise _UnexpectedError("a text of one line")
        if check is not None and value:
            check(value)
        if default is REQUIRED and not value:
            raise _UnexpectedError("a text that is not empty")
        return value

    return Key(name, "text", read, default)


def choice_key(name: str, choices: Sequence[str], default: Any = REQUIRED) -> Key:
    """One of some words."""

    def read(value: Any) -> str:
        if value not in choices:
            raise _UnexpectedError(f"one of {', '.join(choices)}")
        return str(value)

    return Key(name, "text", read, default)


def whole_key(name: str, default: Any = REQUIRED) -> Key:
    """A whole number from 1."""

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _UnexpectedError("a whole number from 1")
        return value

    return Key(name, "int", read, default)


def share_key(name: str, default: float) -> Key:
    """A share above 0, at most 1."""

    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise _UnexpectedError("a share in (0, 1]")
        return float(value)

    return Key(name, "float", read, default)


def flag_key(name: str, default: bool) -> Key:
    """True or false."""

    def read(value: Any) -> bool:
        if not isinstance(value, bool):
            raise _UnexpectedError("true or false")
        return value

    return Key(name, "bool", read, default)


def quantity_key(name: str, parse: Callable[[str | float], float], column: str, default: Any = REQUIRED) -> Key:
    """A quantity with its unit such as ``75GiB``, or a number in the base unit, above 0."""

    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise _UnexpectedError("a quantity with its unit")
        found = parse(value)
        if not (math.isfinite(found) and found > 0):
            raise _UnexpectedError("a quantity above 0")
        return found

    return Key(name, "float", read, default, column)


def read_value(key: Key, value: Any, where: str) -> Cell:
    """Value of a key; null takes the default.

    Raises
    ------
    UsageError
        If the value is not what the key takes; the message names `where`.

    Examples
    --------
    >>> read_value(whole_key("nodes", 1), 4, "grid.nodes[0]")
    4
    >>> read_value(whole_key("nodes", 1), "four", "grid.nodes[0]")
    Traceback (most recent call last):
    overlapsim.errors.UsageError: grid.nodes[0] is 'four'; expected a whole number from 1
    """
    if value is None and key.default is not REQUIRED:
        default: Cell = key.default
        return default
    try:
        return key.read(value)
    except _UnexpectedError as error:
        raise UsageError(f"{where} is {value!r}; expected {error}") from None
    except OverlapSimError as error:
        raise UsageError(f"{where}: {error}") from None


def finding_codes(findings: Iterable[Finding]) -> str:
    """Codes of findings for one cell, each once, in order."""
    return " ".join(dict.fromkeys(finding.code for finding in findings))


def words(text: str) -> tuple[str, ...]:
    """Words of a list separated by commas.

    Examples
    --------
    >>> words("tp<=8, pp=4")
    ('tp<=8', 'pp=4')
    """
    return tuple(word.strip() for word in text.split(",") if word.strip())
