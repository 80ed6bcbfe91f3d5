"""The plan of a whole training step: what to run, what is predicted, what came close, what to try first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from overlapsim.errors import PlanError
from overlapsim.plan.shared import PLAN_VERSION, Finding, OperatorSettings, Prediction

Objective = Literal["step_time", "tokens_per_s_per_gpu", "robust"]
"""What plans of steps are ranked by: time, tokens of a GPU (fewer nodes may do), or the high end when perturbed."""


@dataclass(frozen=True)
class StepPlanInputs:
    """Everything `overlapsim plan` was asked; enough to simulate its plans again.

    Attributes
    ----------
    model, model_sha256 : preset or file, and digest of what it describes
    cluster, cluster_sha256, nodes : as in `OperatorInputs`; with ``tokens_per_s_per_gpu`` plans may use fewer nodes
    global_batch, seq_len : sequences of a step, tokens of each
    dtype : of the model instead of its own; None: its own
    objective : what plans are ranked by
    constraints : rules on degrees and settings, such as ``tp<=8`` and ``recompute=full``
    schedules, dispatchers : that were tried; empty: the planner's
    memory_bytes : of one GPU, that a plan may use; None: all of its HBM
    recipe : name of the kernels that run
    stack, sustained_clock : how kernels are launched; clock of a long run over that of a short benchmark
    allow : choices that change results and were allowed (`planner.allowed.ALLOWED`)
    perturbation : under which plans were ranked; empty: none
    uneven, exhaustive, top : settings of the search
    """

    model: str
    model_sha256: str
    cluster: str
    cluster_sha256: str
    nodes: int
    global_batch: int
    seq_len: int
    dtype: str | None = None
    objective: Objective = "step_time"
    constraints: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    memory_bytes: float | None = None
    recipe: str = "modern"
    stack: str = "graph"
    sustained_clock: float = 1.0
    allow: tuple[str, ...] = ()
    perturbation: str = ""
    uneven: bool = False
    exhaustive: bool = False
    top: int = 5
    dispatchers: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepSettings:
    """How a step is split and run, in neutral terms; ``emit/`` spells them for frameworks.

    Attributes
    ----------
    nodes : of the cluster, that the plan uses
    layout : every degree by name (`workload.layout.KEYS`)
    micro_batch, num_micro_batches : sequences of a micro-batch on one GPU, and how many a replica runs
    stage_layers : layers of each chunk of the model where they are uneven; empty: even
    schedule, p2p, scatter_gather : the pipeline's, and how its transfers stand to computation
    recompute, recompute_modules, recompute_method, recompute_layers : what the backward pass rebuilds
    fp8, compress : linear layers multiply in fp8; what is narrowed on its way (`workload.recipe.COMPRESSIONS`)
    dispatcher, dispatch_dtype : how tokens reach experts, and in which type; empty: the model's
    dp_overlap, bucket_bytes, reshard : what of data parallelism is overlapped, in which pieces; whether ZeRO 3 drops
        parameters after use
    dp_sync : whether replicas inside a node sum before those of others
    rings, rank_order : of the library across nodes; which degrees fill the ranks first
    arranging : strategies that arrange whole graphs, in order, each with its parameters
    """

    nodes: int
    layout: Mapping[str, int | str | bool]
    micro_batch: int
    num_micro_batches: int
    stage_layers: tuple[int, ...]
    schedule: str
    p2p: str
    scatter_gather: bool
    recompute: str
    recompute_modules: tuple[str, ...]
    recompute_method: str
    recompute_layers: int
    fp8: bool
    dp_overlap: str
    bucket_bytes: float
    reshard: bool
    rings: str
    rank_order: tuple[str, ...]
    arranging: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    dispatcher: str = "all_to_all"
    dispatch_dtype: str = ""
    compress: tuple[str, ...] = ()
    dp_sync: str = "hierarchical"


@dataclass(frozen=True)
class StepCandidate:
    """One plan of a step: what to run, and what is predicted of it.

    Attributes
    ----------
    rank : place by the objective, from 1; 0 for a plan that is there to compare with
    settings, operators : of the step, and how each operator (of every layer) is overlapped
    step, perturbed : predicted times; perturbed where a perturbation was asked for
    lower_bound_s : what the hardware forbids this layout to go below
    tokens_per_s, mfu : of all GPUs; share of the dense peak
    memory_bytes : of the fullest GPU, by kind
    breakdown_s : seconds by kind on the device that ends last; their sum is the step
    findings : of this plan and not of all
    """

    rank: int
    settings: StepSettings
    operators: tuple[OperatorSettings, ...]
    step: Prediction
    perturbed: Prediction | None
    lower_bound_s: float
    tokens_per_s: float
    mfu: float
    memory_bytes: Mapping[str, float]
    breakdown_s: Mapping[str, float]
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Trial:
    """A plan to try on hardware, and why."""

    rank: int
    reason: str


@dataclass(frozen=True)
class Measurement:
    """What to measure to decide between two plans.

    Attributes
    ----------
    family : of costs, whose range moves the difference of the two most
    ranks : the two plans
    low_s, high_s : the second's time less the first's, with the family at the end that favours each
    message : what to measure
    """

    family: str
    ranks: tuple[int, int]
    low_s: float
    high_s: float
    message: str


@dataclass(frozen=True)
class Gain:
    """One part of the best plan, on top of those before it.

    Attributes
    ----------
    name, layout : what is added, and the degrees with it
    step_time_s : with it, predicted
    faster, in_all : the step before over this one, and the first over this one
    """

    name: str
    layout: str
    step_time_s: float
    faster: float
    in_all: float


@dataclass(frozen=True)
class Advice:
    """Why the best plan is best, what nearly was, what it exposes, what to try first and what to measure.

    Further what each of its parts gains, and in which order it issues the operators of a layer.
    """

    why: tuple[str, ...] = ()
    near: tuple[str, ...] = ()
    exposed: tuple[str, ...] = ()
    try_on_hardware: tuple[Trial, ...] = ()
    measure_next: tuple[Measurement, ...] = ()
    gains: tuple[Gain, ...] = ()
    order: tuple[str, ...] = ()


@dataclass(frozen=True)
class SearchCount:
    """How many candidates were looked at, run in the engine, and left out for which reason."""

    candidates: int
    run: int
    pruned: Mapping[str, int]


@dataclass(frozen=True)
class StepPlan:
    """The plan file of a training step: the best plan, those behind it, and the fastest without overlap strategies.

    Byte-identical and repeatable as an `OperatorPlan`.
    """

    kind: Literal["step"]
    inputs: StepPlanInputs
    choice: StepCandidate
    alternatives: tuple[StepCandidate, ...]
    serial: StepCandidate | None
    advice: Advice
    search: SearchCount
    findings: tuple[Finding, ...]
    provenance: Mapping[str, str] = field(default_factory=dict)
    version: int = PLAN_VERSION

    @property
    def predictions(self) -> Mapping[str, Prediction]:
        """Predicted step times by what they are of."""
        ranked = {f"plan {entry.rank}": entry for entry in (self.choice, *self.alternatives)}
        serial = {} if self.serial is None else {"the plan without overlap strategies": self.serial}
        return {name: entry.step for name, entry in (ranked | serial).items()}

    def candidate(self, rank: int) -> StepCandidate:
        """The plan of a rank.

        Raises
        ------
        PlanError
            If there is none.
        """
        ranked = (self.choice, *self.alternatives)
        for entry in ranked:
            if entry.rank == rank:
                return entry
        raise PlanError(f"rank {rank} is not in the plan; expected 1 to {len(ranked)}")
