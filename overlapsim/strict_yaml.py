"""Strict YAML for plan and profile files: one boundary where text becomes data, and every fault one error."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

import yaml

MAX_CHARACTERS: Final = 32 * 2**20
"""The largest plan with its curve and map takes a few hundred kilobytes."""

# libyaml reads the same language some ten times faster, where PyYAML was built with it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class YamlFaultError(Exception):
    """Text that is not the YAML we read; the message says what and where."""


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


def parse(text: str) -> Any:
    """Parse one YAML document.

    Parameters
    ----------
    text : str
        At most 32 Mi characters, no aliases, no key twice in one mapping.

    Raises
    ------
    YamlFaultError
        With the line where there is one.

    Examples
    --------
    >>> parse("a: [1, 2.5]")
    {'a': [1, 2.5]}
    """
    if len(text) > MAX_CHARACTERS:
        raise YamlFaultError(f"it has {len(text)} characters; at most {MAX_CHARACTERS} are read")
    try:
        # Aliases share one object many times, which explodes where mappings are merged; only a text with both signs
        # can hold one, so others are not scanned twice.
        if "&" in text and "*" in text:
            for event in yaml.parse(text, _Loader):
                if isinstance(event, yaml.AliasEvent):
                    where = "" if event.start_mark is None else f"line {event.start_mark.line + 1}: "
                    raise YamlFaultError(f"{where}aliases (*name) are not read; write the value out")
        return yaml.load(text, _StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f"line {mark.line + 1}: "
        raise YamlFaultError(f"{where}{error.problem}") from None
    except RecursionError:
        raise YamlFaultError("it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, AttributeError, KeyError) as error:
        # Scalars that claim a type they do not have: dates, huge integers, tags on the wrong value.
        raise YamlFaultError(" ".join(str(error).split())) from None
