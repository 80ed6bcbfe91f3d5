"""Profile files as text: strict YAML in, one mapping out of a chain of files."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources.abc import Traversable
from typing import Any, Final, Literal

import yaml

from overlapsim.errors import ProfileError

Kind = Literal["device", "node", "fabric", "cluster"]
KINDS: Final[tuple[Kind, ...]] = ("device", "node", "fabric", "cluster")


# libyaml reads the same language some ten times faster, where PyYAML was built with it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _StrictLoader(_Loader):  # type: ignore[misc]
    """Safe loader that refuses a key given twice, which YAML would settle silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} appears twice", key_node.start_mark)
            if key is not None:
                seen.add(key)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return mapping


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
        data = yaml.load(content.decode("utf-8-sig"), _StrictLoader)
    except UnicodeDecodeError:
        raise ProfileError(f"profile {label} is not UTF-8 text; expected YAML") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ProfileError(f"profile {label}{line}: {error.problem}; expected YAML as hwprofiles/README.md") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ProfileError(f"profile {label} is not YAML: {error}") from None
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
