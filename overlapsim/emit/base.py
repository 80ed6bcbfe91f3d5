"""The contract of an emitter: a pure function from a plan to files, with what the framework cannot say beside them."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from overlapsim.emit.rules import Known, Version, framework, settle
from overlapsim.errors import PlanError
from overlapsim.hardware.profile import Cluster
from overlapsim.plan import Finding, OperatorPlan, StepCandidate, StepPlan, StepSettings, dump_plan
from overlapsim.workload.layout import KEYS, Layout
from overlapsim.workload.model import ModelSpec

if TYPE_CHECKING:
    from overlapsim.step.inputs import StepInputs


@dataclass(frozen=True)
class Subject:
    """What is emitted: a plan, and what it names.

    Attributes
    ----------
    plan : of one operator or of a training step
    rank : of the plans of a step, from 1
    model : that a plan of a step names (dtype as planned); None for a plan of one operator
    cluster : that the plan names, or None where no device is asked for
    """

    plan: StepPlan | OperatorPlan
    rank: int = 1
    model: ModelSpec | None = None
    cluster: Cluster | None = None

    @property
    def step(self) -> StepPlan:
        """The plan of a training step.

        Raises
        ------
        PlanError
            If the plan is of one operator.
        """
        if not isinstance(self.plan, StepPlan):
            raise PlanError("the plan is of one operator; expected a training step's, as `plan -o DIR` writes")
        return self.plan

    @property
    def operator(self) -> OperatorPlan:
        """The plan of one operator.

        Raises
        ------
        PlanError
            If the plan is of a training step.
        """
        if not isinstance(self.plan, OperatorPlan):
            raise PlanError("the plan is of a training step; expected one operator's, as `operator -o FILE` writes")
        return self.plan

    @property
    def entry(self) -> StepCandidate:
        """The plan of the step that is emitted."""
        return self.step.candidate(self.rank)

    @property
    def settings(self) -> StepSettings:
        """How the step is split and run."""
        return self.entry.settings

    @property
    def layout(self) -> Layout:
        """Degrees of the step.

        Raises
        ------
        PlanError
            If the plan's layout has other keys.
        """
        given = self.settings.layout
        if set(given) != set(KEYS):
            raise PlanError(f"the plan's layout has {', '.join(given)}; expected {', '.join(KEYS)}")
        degrees: dict[str, Any] = dict(given)
        return Layout(**degrees)

    @property
    def spec(self) -> ModelSpec:
        """The model of the step."""
        assert self.model is not None, "whoever emits a step's plan hands its model over"
        return self.model

    @property
    def architecture(self) -> str | None:
        """Of the GPUs, as in device profiles; None where no cluster is given."""
        return None if self.cluster is None else self.cluster.device.architecture

    @property
    def digest(self) -> str:
        """SHA-256 of the plan, its provenance left out: the same choice has the same name."""
        return hashlib.sha256(dump_plan(replace(self.plan, provenance={})).encode()).hexdigest()


@dataclass(frozen=True)
class Emitted:
    """Settings of one framework.

    Attributes
    ----------
    files : text by file name
    unexpressed : what the plan says and the framework cannot be told, one sentence each
    findings : what was believed: a version that is not known, say
    """

    files: Mapping[str, str]
    unexpressed: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Reading:
    """What a config says, in neutral terms; None where it says nothing.

    Attributes
    ----------
    layout : degrees; `dp` is 1 where the number of ranks is not known
    world_size : ranks, where the config names them
    micro_batch, global_batch, seq_len : sequences of a micro-batch and of a step, tokens of a sequence
    model : where the config holds its sizes
    settings : what else is said, by the names of `StepSettings`: ``dp_overlap``, ``recompute``, ``p2p`` ...
    """

    layout: Layout
    world_size: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    model: ModelSpec | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


class Emitter(ABC):
    """One target: a framework, or one of its files.

    Attributes
    ----------
    name : by which `emit --to` calls it
    framework : whose versions it follows, a key of `rules.FRAMEWORKS`
    kind : of the plans it takes
    """

    name: ClassVar[str]
    framework: ClassVar[str]
    kind: ClassVar[str] = "step"

    @property
    def known(self) -> Known:
        """Versions whose rules are known."""
        return framework(self.framework)

    def emit(self, subject: Subject, version: str | None = None) -> Emitted:
        """Return the files of a plan.

        Parameters
        ----------
        subject : what is emitted
        version : of the framework; None: the newest that is known

        Raises
        ------
        PlanError
            If the plan is of another kind, or holds what no version of the framework can run.
        UsageError
            If the version is not a version.
        """
        if subject.plan.kind != self.kind:
            raise PlanError(f"{self.name} takes plans of kind {self.kind}; this one is of kind {subject.plan.kind}")
        settled, findings = settle(self.framework, version)
        emitted = self.write(subject, settled)
        return replace(emitted, findings=(*findings, *emitted.findings))

    @abstractmethod
    def write(self, subject: Subject, version: Version) -> Emitted:
        """Return the files for a version whose rules are known; a pure function."""

    def told(self, subject: Subject) -> StepInputs | None:
        """The step of a plan without what the framework cannot be told; None where that is nothing, or is not known.

        Simulated, it says what is left of the plan's time.
        """
        return None

    def header(self, subject: Subject, version: Version) -> tuple[str, ...]:
        """Lines for the head of every file, without comment signs: which plan, for what."""
        lines = [f"overlapsim plan {subject.digest[:16]} for {self.known.title} {version}"]
        if isinstance(subject.plan, StepPlan):
            inputs = subject.plan.inputs
            lines.append(
                f"plan {subject.rank}: {inputs.model} on {inputs.cluster}, {subject.layout} "
                f"({subject.layout.world_size} GPUs), batch {inputs.global_batch}, {inputs.seq_len} tokens"
            )
        else:
            asked = subject.operator.inputs
            lines.append(f"{asked.collective} of {asked.m} x {asked.n} x {asked.k} on {asked.ranks} of {asked.cluster}")
        return tuple(lines)


def comment(lines: tuple[str, ...], sign: str = "#") -> str:
    """Lines as comments.

    Examples
    --------
    >>> comment(("one", "two")).splitlines()
    ['# one', '# two']
    """
    return "".join(f"{sign} {line}\n" for line in lines)
