"""``--overlap OPERATOR[:PASS]=STRATEGY[:NAME=VALUE,...]``: which strategy takes which operator of every layer.

``step=STRATEGY`` is for strategies that arrange whole graphs: prefetched parameters, delayed weight gradients.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Sequence
from typing import Any, Final

from overlapsim.errors import UsageError
from overlapsim.strategy.compose import Chosen, Composition
from overlapsim.strategy.parameter_words import parameter_defaults
from overlapsim.strategy.registry import load_strategy

WHOLE: Final = "step"
"""In place of an operator, for strategies that take none."""
PASSES: Final = ("fwd", "dgrad", "wgrad", "recompute")
_FORM: Final = "expected OPERATOR[:PASS]=STRATEGY[:NAME=VALUE,...] such as mlp.fc2=chunked:chunks=4"
# Commas between parameters, not those inside a list.
_COMMA: Final = re.compile(r",(?![^\[]*\])")
# A tile as tables print it.
_TILE: Final = re.compile(r"\d+(x\d+)+")


def composition(entries: Sequence[str], known: Collection[tuple[str, str]] | None = None) -> Composition:
    """Strategies by operator.

    Parameters
    ----------
    entries : as given; the forward pass where none is named. A value is a number, a list such as ``[4,4]``,
        a tile such as ``128x256x64``, or a word
    known : (operator, pass) of the GEMMs there are; None where they are checked later

    Raises
    ------
    UsageError
        If an entry has another form, names an unknown operator or pass, or an operator (with ``step`` a strategy)
        comes twice.
    StrategyError
        If the strategy is unknown or does not take the parameters.

    Examples
    --------
    >>> chosen = composition(["mlp.fc2=chunked:chunks=4"]).pairs["mlp.fc2", "fwd"]
    >>> chosen.strategy.name, chosen.parameters
    ('chunked', {'chunks': 4})
    """
    pairs: dict[tuple[str, str], Chosen] = {}
    arranging: dict[str, Chosen] = {}
    for entry in entries:
        where, equals, what = entry.partition("=")
        operator, _, pass_ = where.partition(":")
        name, _, rest = what.partition(":")
        if not (equals and operator and name):
            raise UsageError(f"--overlap is {entry!r}; {_FORM}")
        key = (operator, pass_ or "fwd")
        if key[1] not in PASSES or (operator == WHOLE and pass_):
            expected = "expected none with step" if operator == WHOLE else f"expected one of {', '.join(PASSES)}"
            raise UsageError(f"--overlap {entry!r} names the pass {pass_!r}; {expected}")
        if operator != WHOLE and known is not None and key not in known:
            raise UsageError(f"--overlap {entry!r}: {unknown_gemm(key, known)}")
        if key in pairs or (operator == WHOLE and name in arranging):
            what = name if operator == WHOLE else f"{operator}:{key[1]}"
            raise UsageError(f"--overlap names {what} twice; give it once")
        strategy, parameters = load_strategy(name), _parameters(entry, rest)
        strategy.check(parameters)
        chosen = Chosen(strategy, {**parameter_defaults(strategy.parameter_type), **parameters})
        if operator == WHOLE:
            arranging[name] = chosen
        else:
            pairs[key] = chosen
    return Composition(tuple(arranging.values()), pairs)


def unknown_gemm(key: tuple[str, str], known: Collection[tuple[str, str]]) -> str:
    """Say that a GEMM is unknown, and which there are.

    Examples
    --------
    >>> unknown_gemm(("mlp.fc3", "fwd"), [("mlp.fc2", "dgrad"), ("mlp.fc2", "fwd"), ("attn.out", "fwd")])
    "operator 'mlp.fc3' is unknown: did you mean 'mlp.fc2'? expected one of attn.out (fwd), mlp.fc2 (dgrad, fwd)"
    """
    passes: dict[str, list[str]] = {}
    for name, pass_ in sorted(known):
        passes.setdefault(name, []).append(pass_)
    there = ", ".join(f"{name} ({', '.join(of)})" for name, of in passes.items())
    name, pass_ = key
    if name in passes:
        return f"operator {name!r} has no pass {pass_!r} with a GEMM; expected one of {there}"
    near = difflib.get_close_matches(name, passes, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"operator {name!r} is unknown: {hint}expected one of {there}"


def _parameters(entry: str, text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, _COMMA.split(text)):
        name, equals, value = part.partition("=")
        if not (equals and name and value) or name in found:
            raise UsageError(f"--overlap is {entry!r} with the parameter {part!r}; {_FORM}, each parameter once")
        found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    if _TILE.fullmatch(text):
        return [int(part) for part in text.split("x")]
    try:
        return json.loads(text)
    except ValueError:
        return text
