"""The plan file: what was asked, what was chosen, what is predicted and how far to trust it (YAML, versioned)."""

from overlapsim.plan.files import Plan, dump_plan, load_plan, of_kind, read_plan
from overlapsim.plan.operator import Alternative, Cause, Choice, CurveInput, OperatorInputs, OperatorPlan, Verdict
from overlapsim.plan.shared import PLAN_VERSION, Finding, OperatorSettings, Prediction
from overlapsim.plan.step import (
    Advice,
    Gain,
    Measurement,
    Objective,
    SearchCount,
    StepCandidate,
    StepPlan,
    StepPlanInputs,
    StepSettings,
    Trial,
)

__all__ = [
    "PLAN_VERSION",
    "Advice",
    "Alternative",
    "Cause",
    "Choice",
    "CurveInput",
    "Finding",
    "Gain",
    "Measurement",
    "Objective",
    "OperatorInputs",
    "OperatorPlan",
    "OperatorSettings",
    "Plan",
    "Prediction",
    "SearchCount",
    "StepCandidate",
    "StepPlan",
    "StepPlanInputs",
    "StepSettings",
    "Trial",
    "Verdict",
    "dump_plan",
    "load_plan",
    "of_kind",
    "read_plan",
]
