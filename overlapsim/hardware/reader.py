"""Reads one profile field by field and collects every problem, so that one message lists them all."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from overlapsim.hardware.documents import Document, Kind, is_leaf, merge_chain
from overlapsim.hardware.profile import Source
from overlapsim.hardware.quantity import LEAF_KEYS, QuantityError, read_quantity, read_source
from overlapsim.hardware.schema import DEVICE_FIELDS, FABRIC_FIELDS, KERNEL_FIELDS, NODE_FIELDS, PEAK_FIELD, Field

COMMON_KEYS: Final = ("kind", "extends", "notes")
TABLE_KEYS: Final = ("file", *LEAF_KEYS[2:])

_PLACES: Final[Mapping[str, str]] = {
    **{field.key: "a file of kind: device" for field in (*DEVICE_FIELDS, PEAK_FIELD)},
    **{field.key: "kernels in a file of kind: device" for field in KERNEL_FIELDS},
    **{field.key: "a file of kind: node" for field in NODE_FIELDS},
    **{field.key: "a file of kind: fabric" for field in FABRIC_FIELDS},
}
"""Where each number of a machine stands."""


def _of_another_kind(key: str) -> str:
    """What a key was meant to be in a file of another kind; empty where nothing is near."""
    near = difflib.get_close_matches(key, _PLACES, n=1)
    if not near:
        return ""
    meant = "it" if near[0] == key else f"did you mean {near[0]}? It"
    return f"{meant} stands in {_PLACES[near[0]]}"


class Reader:
    """One profile (its chain of files merged) being read.

    Attributes
    ----------
    chain : files it was merged from, base first
    sources : source of every number read so far, by field name
    problems : shared list that all readers of one load write to
    """

    def __init__(self, kind: Kind, chain: Sequence[Document], problems: list[str]) -> None:
        self.name = chain[-1].name
        self.sources: dict[str, Source] = {}
        self.chain, self.kind = chain, kind
        self._where = f"{kind} {self.name} ({chain[-1].label})"
        self._data = merge_chain(chain)
        self._problems = problems
        self._count = len(problems)
        if self._data.get("kind") != kind:
            given = f"kind is {self._data['kind']!r}" if "kind" in self._data else "missing key kind"
            self.problem(f"{given}; expected kind: {kind}")

    @property
    def failed(self) -> bool:
        """Whether any problem was found since this reader was made."""
        return len(self._problems) > self._count

    def problem(self, text: str) -> None:
        """Note one problem."""
        self._problems.append(f"{self._where}: {text}")

    def section(self, key: str, *, required: bool = True) -> Mapping[str, Any]:
        """The mapping below `key`, empty if it is missing."""
        value = self._data.get(key, {})
        if not isinstance(value, dict) or is_leaf(value):
            self.problem(f"{key} is {value!r}; expected a section of keys")
            return {}
        if required and not value:
            self.problem(f"missing section {key}")
        return value

    def numbers(self, fields: Iterable[Field], section: str = "") -> dict[str, Any]:
        """Values of required `fields` by attribute name; a field with a problem is left out."""
        data = self.section(section) if section else self._data
        values: dict[str, Any] = {}
        for field in fields:
            path = f"{section}.{field.key}" if section else field.key
            if field.key not in data:
                if data:
                    self.problem(f"missing key {path}")
                continue
            name = f"{section}.{field.attribute}" if section else field.attribute
            self._number(path, name, data[field.key], field, values, field.attribute)
        return values

    def optional_number(self, field: Field, default: Any) -> Any:
        """Value of one top-level field, or the default."""
        if field.key not in self._data:
            return default
        return self.numbers((field,)).get(field.attribute, default)

    def named_numbers(self, section: str, field: Field) -> dict[str, Any]:
        """Every entry of a section read alike, by its own key (peaks by dtype)."""
        values: dict[str, Any] = {}
        for key, entry in self.section(section).items():
            self._number(f"{section}.{key}", f"{field.attribute}.{key}", entry, field, values, str(key))
        return values

    def _number(self, path: str, name: str, entry: Any, field: Field, values: dict[str, Any], key: str) -> None:
        try:
            values[key], self.sources[name] = read_quantity(entry, field, self._origin(path))
        except QuantityError as error:
            self.problem(f"{path} {error}")

    def choice(self, key: str, allowed: Sequence[str]) -> str | None:
        """A required word out of `allowed`."""
        value = self._data.get(key)
        if value not in allowed:
            self.problem(
                f"missing key {key}" if value is None else f"{key} is {value!r}; expected {', '.join(allowed)}"
            )
            return None
        return str(value)

    def has(self, key: str) -> bool:
        """Whether the profile sets `key` at its top."""
        return key in self._data

    def inline(self, kind: Kind) -> Document | None:
        """A profile of another kind that stands in this one, below its kind, instead of being named."""
        value = self._data.get(kind)
        if not isinstance(value, dict):
            return None
        # Its text was counted with the file it stands in.
        return Document(self.name, f"{kind} in {self.chain[-1].label}", b"", {"kind": kind, **value})

    def word(self, key: str) -> str | None:
        """A required text."""
        value = self._data.get(key)
        if not isinstance(value, str) or not value:
            self.problem(f"missing key {key}" if value is None else f"{key} is {value!r}; expected a name")
            return None
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._data.get(key, default)
        if not isinstance(value, bool):
            self.problem(f"{key} is {value!r}; expected true or false")
            return default
        return value

    def table(self, path: str, entry: Any) -> tuple[str, Source] | None:
        """File and source of a measured table."""
        if not isinstance(entry, dict) or not isinstance(entry.get("file"), str):
            self.problem(f"{path} is {entry!r}; expected a mapping with file, source, layer and trust")
            return None
        self.unknown(entry, TABLE_KEYS, path)
        try:
            return entry["file"], read_source({"layer": "measured", **entry}, self._origin(path))
        except QuantityError as error:
            self.problem(f"{path} {error}")
            return None

    def unknown(self, data: Mapping[str, Any], allowed: Sequence[str], section: str = "", elsewhere: str = "") -> None:
        """Note keys that nothing reads, each with the nearest one that exists."""
        for key in data:
            if key not in allowed:
                near = difflib.get_close_matches(str(key), allowed, n=1)
                hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(allowed)}"
                if elsewhere and (not near or key in _PLACES):
                    hint = _of_another_kind(str(key)) or hint
                self.problem(f"unknown key {section + '.' if section else ''}{key}; {hint}{elsewhere}")

    def unknown_top(self, allowed: Sequence[str]) -> None:
        """Note unknown keys at the top of the file, and what kind of file it was read as."""
        read_as = f" (read as kind: {self.kind}"
        if "kind" not in self.chain[-1].data:
            read_as += ", which the file does not say: add its kind:"
        self.unknown(self._data, (*COMMON_KEYS, *allowed), elsewhere=f"{read_as})")

    def last_with(self, *keys: str) -> int:
        """Place in the chain of the last file that sets what stands below `keys`; the chain's last if none does."""
        for place in range(len(self.chain) - 1, -1, -1):
            value: Any = self.chain[place].data
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                return place
        return len(self.chain) - 1

    def _origin(self, path: str) -> str:
        """Name of the last file that sets `path`: the source of a number that names none."""
        return f"{self.chain[self.last_with(*path.split('.'))].name}.yaml"
