"""The plan file: what was asked, what was chosen, what is predicted and how far to trust it (YAML, versioned)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from overlapsim.errors import PlanError

PLAN_VERSION: Final = 1
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
class Plan:
    """One plan file.

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


def dump_plan(plan: Plan) -> str:
    """YAML text of `plan`; keys in the order of the dataclasses, floats in their shortest exact form.

    Examples
    --------
    >>> inputs = OperatorInputs("a800-sxm8", "", 1, 2, 64, 64, 64, "fp16", "fp16", "all_reduce")
    >>> plan = Plan("operator", inputs, Choice("serial", "serial", "none", 1.0, 1.0, 1.0), (), {}, (), ())
    >>> load_plan(dump_plan(plan)) == plan
    True
    """
    import yaml

    content = msgspec.to_builtins(plan)
    ordered = {"version": content.pop("version"), "kind": content.pop("kind"), **content}
    return yaml.dump(ordered, Dumper=_dumper(), sort_keys=False, allow_unicode=True, width=110)


def load_plan(text: str, name: str = "plan") -> Plan:
    """Read a plan from YAML text.

    Parameters
    ----------
    text : content of a plan file
    name : file name for messages

    Raises
    ------
    PlanError
        If the text is not YAML, not a plan, from a newer version, or misses or mistypes a field.
    """
    from overlapsim.strict_yaml import YamlFaultError, parse

    try:
        content = parse(text)
    except YamlFaultError as fault:
        raise PlanError(f"{name} is not readable YAML ({fault}); expected a plan file") from None
    if not isinstance(content, dict) or "version" not in content:
        raise PlanError(f"{name} is not a plan file: it has no version; write one with `operator -o`")
    if content["version"] != PLAN_VERSION:
        raise PlanError(
            f"{name} is a plan of version {content['version']!r}; this overlapsim reads version {PLAN_VERSION}"
        )
    try:
        plan = msgspec.convert(content, Plan)
    except msgspec.ValidationError as error:
        raise PlanError(f"{name} is not a valid plan: {error}; plan again with `operator -o`") from None
    for strategy, prediction in plan.predictions.items():
        if not 0 < prediction.low_s <= prediction.value_s <= prediction.high_s < math.inf:
            raise PlanError(f"{name} predicts {prediction} for {strategy}; expected 0 < low_s <= value_s <= high_s")
    return plan


def read_plan(path: str | Path) -> Plan:
    """Read a plan file.

    Raises
    ------
    PlanError
        If the file cannot be read or is not a plan.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PlanError(f"cannot read plan {path}: there is no such file; write one with `operator -o`") from None
    except IsADirectoryError:
        raise PlanError(f"cannot read plan {path}: it is a folder; expected a plan file (YAML)") from None
    except UnicodeDecodeError:
        raise PlanError(f"cannot read plan {path}: it is not text; expected a plan file (YAML)") from None
    except OSError as error:
        raise PlanError(f"cannot read plan {path}: {error.strerror}; expected a plan file (YAML)") from None
    return load_plan(text, str(path))


def _dumper() -> type:
    import yaml

    class PlanDumper(yaml.SafeDumper):
        """Long lists of numbers on few lines; no anchors, so that equal parts stay readable."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

        def represent_numbers(self, data: Any) -> yaml.nodes.SequenceNode:
            flat = all(isinstance(x, int | float) for x in data)
            return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)

    PlanDumper.add_representer(list, PlanDumper.represent_numbers)
    PlanDumper.add_representer(tuple, PlanDumper.represent_numbers)
    return PlanDumper
