"""What a strategy's parameters are, in words: names, types, what they are where left out, and an example to type."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

EXAMPLE_TILE: Final = (128, 256, 64)
"""Of the large GEMMs of transformers on Ampere and Hopper; an example, not advice."""
EXAMPLE_WHOLE: Final = 4
EXAMPLE_ROWS: Final = 1024
"""Of what may be counted in millions, such as rows."""
EXAMPLE_SMS: Final = 16
"""Of those that only communicate; an example, not advice."""
MANY: Final = 10**6
EXAMPLE_NUMBER: Final = 40e6


def parameter_words(parameter_type: type) -> dict[str, str]:
    """Type of each parameter of a strategy, and its value where it may be left out.

    Parameters
    ----------
    parameter_type : the dataclass of the parameters

    Examples
    --------
    >>> from overlapsim.strategy.registry import load_strategy
    >>> parameter_words(load_strategy("chunked").parameter_type)
    {'chunks': 'whole number of 1 to 65536'}
    >>> parameter_words(load_strategy("fused_tiles").parameter_type)["transport"]
    'copy_engine or stores (copy_engine if left out)'
    """
    found = {}
    for name, (kind, default) in _kinds(parameter_type).items():
        left_out = "" if default is MISSING else f" ({_typed(default, tile=name == 'tile')} if left out)"
        found[name] = _word(name, kind) + left_out
    return found


def parameter_defaults(parameter_type: type) -> dict[str, Any]:
    """Parameters that may be left out, with what they are then.

    Examples
    --------
    >>> from overlapsim.strategy.registry import load_strategy
    >>> parameter_defaults(load_strategy("chunked").parameter_type)
    {}
    """
    return {name: default for name, (_, default) in _kinds(parameter_type).items() if default is not MISSING}


def parameter_example(parameter_type: type) -> str:
    """Parameters that may not be left out, as ``--overlap`` reads them; empty where there are none.

    Examples
    --------
    >>> from overlapsim.strategy.registry import load_strategy
    >>> parameter_example(load_strategy("fused_tiles").parameter_type)
    'tile=128x256x64,comm_rows=1024'
    """
    needed = {name: kind for name, (kind, default) in _kinds(parameter_type).items() if default is MISSING}
    return ",".join(f"{name}={_typed(_example(name, kind), tile=name == 'tile')}" for name, kind in needed.items())


def _kinds(parameter_type: type) -> Mapping[str, tuple[Any, Any]]:
    hints = typing.get_type_hints(parameter_type, include_extras=True)
    return {item.name: (hints[item.name], item.default) for item in fields(parameter_type)}


def _parts(kind: Any) -> tuple[Any, Meta]:
    """A type, and the limits that its annotation sets."""
    if typing.get_origin(kind) is Annotated:
        plain, *extras = typing.get_args(kind)
        return plain, next((extra for extra in extras if isinstance(extra, Meta)), Meta())
    return kind, Meta()


def _word(name: str, kind: Any) -> str:
    plain, limits = _parts(kind)
    if typing.get_origin(plain) is Literal:
        return " or ".join(map(str, typing.get_args(plain)))
    if plain is bool:
        return "true or false"
    if sizes := _tile_sizes(name, plain):
        return f"tile {'x'.join(('BM', 'BN', 'BK')[:sizes])} such as {_typed(EXAMPLE_TILE[:sizes], tile=True)}"
    if typing.get_origin(plain) is tuple:
        return "list such as [4,4]"
    what = {int: "whole number", float: "number", str: "word"}.get(plain, str(plain))
    if limits.ge is not None and limits.le is not None:
        return f"{what} of {limits.ge:g} to {limits.le}"
    if limits.ge is not None:
        return f"{what} of at least {limits.ge:g}"
    return f"{what} above {limits.gt:g}" if limits.gt is not None else what


def _example(name: str, kind: Any) -> Any:
    plain, limits = _parts(kind)
    if typing.get_origin(plain) is Literal:
        return typing.get_args(plain)[0]
    if plain is bool:
        return True
    if sizes := _tile_sizes(name, plain):
        return EXAMPLE_TILE[:sizes]
    if typing.get_origin(plain) is tuple:
        return (EXAMPLE_WHOLE, EXAMPLE_WHOLE)
    if plain is int:
        many = limits.le is not None and limits.le >= MANY
        usual = EXAMPLE_SMS if name.endswith("_sms") else EXAMPLE_ROWS if many else EXAMPLE_WHOLE
        least = usual if limits.ge is None else max(limits.ge, usual)
        return least if limits.le is None else min(least, limits.le)
    return EXAMPLE_NUMBER if plain is float else "word"


def _tile_sizes(name: str, plain: Any) -> int:
    """Sizes of a tile, two or three; 0 for what is none."""
    sizes = typing.get_args(plain) if typing.get_origin(plain) is tuple else ()
    return len(sizes) if name == "tile" and len(sizes) in (2, 3) and ... not in sizes else 0


def _typed(value: Any, *, tile: bool = False) -> str:
    """A value as it is typed."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "x".join(map(str, value)) if tile else f"[{','.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
