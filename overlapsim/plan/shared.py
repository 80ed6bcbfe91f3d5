"""What plans of every kind hold: findings, predictions, settings of operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

PLAN_VERSION: Final = 1


@dataclass(frozen=True)
class Finding:
    """Something asked for and not applied, or believed and not measured.

    Attributes
    ----------
    code : short stable name such as ``kernel_time_assumed``
    message : one sentence for people: what, and what to do about it
    """

    code: str
    message: str


@dataclass(frozen=True)
class Prediction:
    """A predicted time and its central 90 % interval, seconds."""

    value_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True)
class OperatorSettings:
    """How one operator is overlapped, in neutral terms; ``emit/`` and ``validate/`` spell them for frameworks.

    Attributes
    ----------
    operator, pass_ : fixed name and pass
    strategy : name in the registry
    parameters : what the strategy's ``rewrite`` takes
    settings : what kernels need: collective, ranks, dtype, BM, BN, BK, swizzle, group_tiles, SM reserve ...
    """

    operator: str
    pass_: str
    strategy: str
    parameters: Mapping[str, Any]
    settings: Mapping[str, Any]
