"""The plan of one GEMM and its collective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from overlapsim.plan.shared import PLAN_VERSION, Finding, OperatorSettings, Prediction

Verdict = Literal["overlap", "serial", "tie"]
Cause = Literal[
    "none",
    "under_one_wave",
    "few_tiles",
    "small_message",
    "kernel_slower",
    "little_to_hide",
    "link_bound",
    "contention",
]


@dataclass(frozen=True)
class CurveInput:
    """A measured collective curve handed in by the user, kept whole so that the plan can be run again."""

    file: str
    sha256: str
    size_bytes: tuple[float, ...]
    time_s: tuple[float, ...]


@dataclass(frozen=True)
class OperatorInputs:
    """Everything `overlapsim operator` was asked; enough to simulate the plan again.

    Attributes
    ----------
    cluster, cluster_sha256 : name (or file) of the profile and digest of the files behind it
    nodes, ranks : machines in use, ranks of the collective
    m, n, k, dtype, accumulate : the GEMM on one rank
    gemm_time_s : measured vendor kernel, or None
    kernel_time_s : measured kernel of a strategy, by strategy name
    tile : (BM, BN) or (BM, BN, BK) the kernel times belong to, or None
    comm_sms : SMs the collective holds, or None for the cluster's
    contention : False leaves HBM and link sharing out
    rank_rows : rows of C on each rank where an all_to_all's routing is unbalanced; empty where all have m
    stack : how the host launches kernels (``cost/launch.py``); ``graph`` charges nothing for it
    independent_bytes : size of a collective that is independent of the GEMM (a bulk pair), or None for one on its
        output (all_gather: on its input)
    """

    cluster: str
    cluster_sha256: str
    nodes: int
    ranks: int
    m: int
    n: int
    k: int
    dtype: str
    accumulate: str
    collective: str
    gemm_time_s: float | None = None
    kernel_time_s: Mapping[str, float] = field(default_factory=dict)
    curve: CurveInput | None = None
    tile: tuple[int, ...] | None = None
    comm_sms: int | None = None
    contention: bool = True
    rank_rows: tuple[int, ...] = ()
    independent_bytes: float | None = None
    stack: str = "graph"


@dataclass(frozen=True)
class Alternative:
    """A strategy that was considered and not chosen."""

    strategy: str
    applies: bool
    reasons: tuple[str, ...]
    prediction: Prediction | None
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Choice:
    """The decision and why."""

    strategy: str
    verdict: Verdict
    cause: Cause
    serial_s: float
    ceiling: float
    lower_bound_s: float


@dataclass(frozen=True)
class OperatorPlan:
    """The plan file of one GEMM and its collective.

    Same inputs give a byte-identical file, the provenance block excepted;
    reading it back and simulating gives the same numbers.
    """

    kind: Literal["operator"]
    inputs: OperatorInputs
    choice: Choice
    operators: tuple[OperatorSettings, ...]
    predictions: Mapping[str, Prediction]
    findings: tuple[Finding, ...]
    alternatives: tuple[Alternative, ...]
    provenance: Mapping[str, str] = field(default_factory=dict)
    version: int = PLAN_VERSION
