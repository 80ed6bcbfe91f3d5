"""Profile files as text: strict YAML in, one mapping out of a chain of files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources.abc import Traversable
from typing import Any, Final, Literal

from overlapsim.errors import ProfileError
from overlapsim.strict_yaml import YamlFaultError, parse

Kind = Literal["device", "node", "fabric", "cluster"]
KINDS: Final[tuple[Kind, ...]] = ("device", "node", "fabric", "cluster")


@dataclass(frozen=True)
class Document:
    """One profile file.

    Attributes
    ----------
    name : file name without its suffix, which is the profile's name
    label : full path, for messages
    content : bytes as read, for the digest
    data : top-level mapping
    root : folder of the library it was found in: what belongs to it by name lies there
    """

    name: str
    label: str
    content: bytes
    data: Mapping[str, Any]
    root: Traversable | None = None


def parse_document(name: str, label: str, content: bytes) -> Document:
    """Parse YAML text into a document.

    Raises
    ------
    ProfileError
        If the text is not UTF-8, not YAML (the message has the line), repeats a key, or is not a mapping.
    """
    try:
        data = parse(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ProfileError(f"profile {label} is not UTF-8 text; expected YAML") from None
    except YamlFaultError as fault:
        where = f", {fault}" if str(fault).startswith("line ") else f" is not YAML: {fault}"
        raise ProfileError(f"profile {label}{where}; expected YAML as in hwprofiles/README.md") from None
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ProfileError(f"profile {label} is not a mapping of names to values; see hwprofiles/README.md")
    return Document(name, label, content, data)


def read_document(entry: Traversable, root: Traversable | None = None) -> Document:
    """Read and parse one profile file.

    Raises
    ------
    ProfileError
        As `parse_document`, or if the file cannot be read.
    """
    try:
        content = entry.read_bytes()
    except OSError as error:
        raise ProfileError(f"profile {entry} cannot be read: {error.strerror}") from None
    return replace(parse_document(stem_of(entry), str(entry), content), root=root)


def merge_chain(chain: Sequence[Document]) -> dict[str, Any]:
    """Later files over earlier ones: mappings merge, all else is replaced, null removes a key."""
    merged: dict[str, Any] = {}
    for document in chain:
        merged = _merge(merged, document.data)
    return merged


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict) and not is_leaf(value) and not is_leaf(merged.get(key)):
            inherited = merged.get(key)
            merged[key] = _merge(inherited if isinstance(inherited, dict) else {}, value)
        else:
            # A quantity is replaced whole: a user's value must not keep the sheet's source.
            merged[key] = value
    return merged


def is_leaf(value: object) -> bool:
    """Whether a mapping is one quantity or one table rather than a section."""
    return isinstance(value, dict) and ("value" in value or "file" in value)


def stem_of(entry: Traversable) -> str:
    """Name of the profile in a file."""
    return entry.name.removesuffix(".yaml").removesuffix(".yml")
