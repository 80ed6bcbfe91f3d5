"""What a whole step is asked with: model, machine, layout, schedule and what the software does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from overlapsim.cost.launch import STACKS
from overlapsim.errors import LayoutError, UsageError
from overlapsim.hardware.nic_sharing import Rings
from overlapsim.hardware.profile import Cluster
from overlapsim.schedule.pipeline_kinds import schedule_kind
from overlapsim.schedule.pipeline_links import P2pMode
from overlapsim.step.perturb import NONE, Perturbation
from overlapsim.strategy.compose import Composition
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job, check_layout
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.rank_map import ORDER
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.recompute import Recompute
from overlapsim.workload.state_precision import StatePrecision

DpOverlap = Literal["none", "gradients", "both"]
DP_OVERLAPS: Final[tuple[DpOverlap, ...]] = get_args(DpOverlap)
"""What of data parallelism runs beside computation: nothing, the reduction of gradients, or the gather of parameters
(ZeRO) too."""
DpSync = Literal["hierarchical", "flat"]
DP_SYNCS: Final[tuple[DpSync, ...]] = get_args(DpSync)
"""How gradients and parameters that a node holds in copies are brought together: in the node and then between nodes,
or over all ranks at once."""
DEFAULT_BUCKET_BYTES: Final = 160e6
"""Megatron-LM's ``--ddp-bucket-size`` of 40 million fp32 gradients."""
RANK_BUCKET_BYTES: Final = 4e6
"""What a default bucket has at least for each data-parallel rank: a million gradients, as Megatron-LM has it (rings of
many ranks are slow with small messages)."""


@dataclass(frozen=True)
class StepInputs:
    """One training step.

    Attributes
    ----------
    model, cluster, layout, job : what is trained, on which machine (its nodes counted), how it is split, which batch
    schedule : name in `pipeline_kinds.SCHEDULES`; empty: 1F1B, interleaved where the layout has virtual stages
    p2p : how transfers of the pipeline stand to computation; None: blocking without virtual stages, else ``steady``,
        as Megatron-LM does; ``overlapped`` in zero-bubble schedules and those with F&B pairs
    scatter_gather : tensor-parallel ranks send one slice each and gather it on arrival (where activations are whole)
    recompute, recipe : what is rebuilt, and which kernels run
    precision : bytes of a parameter's state; None: mixed precision with fp32 gradients
    stack : how kernels are launched (`cost.launch`)
    dp_overlap, bucket_bytes : what of data parallelism is overlapped, and in which pieces (the default grows with the
        data-parallel ranks)
    dp_sync : ``hierarchical`` reduces what Ulysses' ranks of a node hold in copies within the node first, and gathers
        it there last, beside what goes between nodes; ``flat`` takes all of them for one group
    reshard : ZeRO 3 gathers parameters before each use and drops them after it, and scatters gradients, in each
        micro-batch; False keeps them whole over the step, gathered once
    rings : whether the library's rings across nodes have mirror images (`hardware.nic_sharing`)
    rank_order : order in which degrees fill the ranks
    sustained_clock : clock of a long run over that of a short benchmark, in (0, 1]
    composition : overlap strategies by operator
    perturbation : slow ranks, degraded links, jitter and unbalanced experts
    contention : False leaves HBM and link sharing out

    Raises
    ------
    LayoutError
        If the model cannot run in the layout, the layout does not fill the machine, or the schedule does not exist.
    UsageError
        If a setting is unknown or out of range.
    """

    model: ModelSpec
    cluster: Cluster
    layout: Layout
    job: Job
    schedule: str = ""
    p2p: P2pMode | None = None
    scatter_gather: bool = True
    recompute: Recompute = field(default_factory=Recompute)
    recipe: Recipe = field(default_factory=Recipe)
    precision: StatePrecision | None = None
    stack: str = "graph"
    dp_overlap: DpOverlap = "none"
    bucket_bytes: float = DEFAULT_BUCKET_BYTES
    dp_sync: DpSync = "hierarchical"
    reshard: bool = True
    rings: Rings = "mirrored"
    rank_order: tuple[str, ...] = ORDER
    sustained_clock: float = 1.0
    composition: Composition = field(default_factory=Composition)
    perturbation: Perturbation = NONE
    contention: bool = True

    def __post_init__(self) -> None:
        check_layout(self.layout, self.model, self.job)
        if self.layout.world_size > self.cluster.num_devices:
            raise LayoutError(
                f"{self.layout} has {self.layout.world_size} ranks and {self.cluster.name} with "
                f"{self.cluster.num_nodes} node(s) has {self.cluster.num_devices} GPUs; expected a smaller layout, or "
                "more nodes"
            )
        schedule_kind(self.schedule_name)
        if self.stack not in STACKS and f"launch.{self.stack}" not in self.cluster.device.fits:
            raise UsageError(f"launch stack {self.stack!r} is unknown; expected one of {', '.join(STACKS)}")
        if self.dp_overlap not in DP_OVERLAPS:
            raise UsageError(f"dp_overlap is {self.dp_overlap!r}; expected one of {', '.join(DP_OVERLAPS)}")
        if self.dp_sync not in DP_SYNCS:
            raise UsageError(f"dp_sync is {self.dp_sync!r}; expected one of {', '.join(DP_SYNCS)}")
        if not 0 < self.sustained_clock <= 1:
            raise UsageError(f"sustained_clock is {self.sustained_clock}; expected a share in (0, 1]")
        if not self.bucket_bytes > 0:
            raise UsageError(f"bucket_bytes is {self.bucket_bytes}; expected a size above 0")

    @property
    def schedule_name(self) -> str:
        """Schedule, with the default filled in."""
        return self.schedule or ("interleaved" if self.layout.vpp > 1 else "1f1b")

    @property
    def p2p_mode(self) -> P2pMode:
        """Mode of the pipeline's transfers, with the default filled in."""
        kind = schedule_kind(self.schedule_name)
        if kind.splits_backward or kind.has_pairs:
            return self.p2p or "overlapped"
        return self.p2p or ("steady" if self.layout.vpp > 1 else "blocking")

    @property
    def sharded(self) -> bool:
        """Whether layers gather their parameters before each use."""
        return self.layout.zero == 3 and self.reshard

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one pipeline."""
        return self.job.num_micro_batches(self.layout)
