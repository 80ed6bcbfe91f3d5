"""``--overlap OPERATOR[:PASS]=STRATEGY[:NAME=VALUE,...]``: which strategy takes which operator of every layer.

``step=STRATEGY`` is for strategies that arrange whole graphs: prefetched parameters, delayed weight gradients.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from overlapsim.errors import UsageError
from overlapsim.strategy.compose import Chosen, Composition
from overlapsim.strategy.registry import load_strategy

WHOLE: Final = "step"
"""In place of an operator, for strategies that take none."""
PASSES: Final = ("fwd", "dgrad", "wgrad", "recompute")
_FORM: Final = "expected OPERATOR[:PASS]=STRATEGY[:NAME=VALUE,...] such as mlp.fc2=chunked:chunks=4"
# Commas between parameters, not those inside a list.
_COMMA: Final = re.compile(r",(?![^\[]*\])")


def composition(entries: Sequence[str]) -> Composition:
    """Strategies by operator.

    Parameters
    ----------
    entries : as given; the forward pass where none is named. A value is a number, a list such as ``[4,4]`` or a word

    Raises
    ------
    UsageError
        If an entry has another form, names an unknown pass, or an operator (with ``step`` a strategy) comes twice.
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
        if key in pairs or (operator == WHOLE and name in arranging):
            what = name if operator == WHOLE else f"{operator}:{key[1]}"
            raise UsageError(f"--overlap names {what} twice; give it once")
        chosen = Chosen(load_strategy(name), _parameters(entry, rest))
        chosen.strategy.check(chosen.parameters)
        if operator == WHOLE:
            arranging[name] = chosen
        else:
            pairs[key] = chosen
    return Composition(tuple(arranging.values()), pairs)


def _parameters(entry: str, text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, _COMMA.split(text)):
        name, equals, value = part.partition("=")
        if not (equals and name and value) or name in found:
            raise UsageError(f"--overlap is {entry!r} with the parameter {part!r}; {_FORM}, each parameter once")
        found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
