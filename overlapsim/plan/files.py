"""Plan files: YAML text of a plan and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from overlapsim.errors import PlanError
from overlapsim.plan.operator import OperatorPlan
from overlapsim.plan.shared import PLAN_VERSION
from overlapsim.plan.step import StepPlan

Plan = OperatorPlan | StepPlan
SomePlan = TypeVar("SomePlan", OperatorPlan, StepPlan)
KINDS: Final[Mapping[str, type[OperatorPlan] | type[StepPlan]]] = {"operator": OperatorPlan, "step": StepPlan}
COMMANDS: Final = {"operator": "operator -o", "step": "plan -o"}
"""What writes each kind."""
_WRITERS: Final = " or ".join(f"`{command}`" for command in COMMANDS.values())


def of_kind(plan: Plan, kind: type[SomePlan], name: str = "the plan") -> SomePlan:
    """The plan, where it is of the kind that is needed.

    Raises
    ------
    PlanError
        If it is of another kind.
    """
    if isinstance(plan, kind):
        return plan
    wanted = next(key for key, known in KINDS.items() if known is kind)
    raise PlanError(f"{name} is of kind {plan.kind}; expected one of kind {wanted}, as `{COMMANDS[wanted]}` writes")


def dump_plan(plan: Plan) -> str:
    """YAML text of `plan`; keys in the order of the dataclasses, floats in their shortest exact form.

    Examples
    --------
    >>> from overlapsim.plan import Choice, OperatorInputs
    >>> inputs = OperatorInputs("a800-sxm8", "", 1, 2, 64, 64, 64, "fp16", "fp16", "all_reduce")
    >>> plan = OperatorPlan("operator", inputs, Choice("serial", "serial", "none", 1.0, 1.0, 1.0), (), {}, (), ())
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
        raise PlanError(f"{name} is not a plan file: it has no version; write one with {_WRITERS}")
    if content["version"] != PLAN_VERSION:
        raise PlanError(
            f"{name} is a plan of version {content['version']!r}; this overlapsim reads version {PLAN_VERSION}"
        )
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise PlanError(f"{name} is a plan of kind {kind!r}; expected one of {', '.join(KINDS)}")
    try:
        plan: Plan = msgspec.convert(content, KINDS[kind])
    except msgspec.ValidationError as error:
        raise PlanError(f"{name} is not a valid plan: {error}; plan again with `{COMMANDS[kind]}`") from None
    for what, prediction in plan.predictions.items():
        if not 0 < prediction.low_s <= prediction.value_s <= prediction.high_s < math.inf:
            raise PlanError(f"{name} predicts {prediction} for {what}; expected 0 < low_s <= value_s <= high_s")
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
        raise PlanError(f"cannot read plan {path}: there is no such file; write one with {_WRITERS}") from None
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
