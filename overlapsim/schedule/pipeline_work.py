"""What stages and hand-overs of a pipeline cost: simulated blocks and transfers, priced by the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from overlapsim.errors import ProgramError
from overlapsim.units import ps_from_s


@dataclass(frozen=True)
class Block:
    """A simulated piece of work, a stage's forward say, as equal steps one after another.

    Attributes
    ----------
    units : steps; a collective can start when some of them are done
    unit_ps : time of one step alone, ps
    demands : resource of the program under construction to amount per step
    op : operator name for reports
    mem_start, mem_end : bytes allocated at its start and freed at its end, for reports
    """

    units: int
    unit_ps: int
    demands: Mapping[int, float] = field(default_factory=dict)
    op: str = ""
    mem_start: float = 0.0
    mem_end: float = 0.0

    @classmethod
    def of_seconds(cls, duration_s: float, *, units: int = 1, demands: Mapping[int, float] | None = None) -> Block:
        """`duration_s` in `units` equal steps, each to the nearest ps; `demands` per step.

        Raises
        ------
        UsageError
            If the duration is not finite or negative.

        Examples
        --------
        >>> Block.of_seconds(3e-3, units=4).unit_ps
        750000000
        """
        return cls(units, ps_from_s(duration_s / units), demands or {})


@dataclass(frozen=True)
class Transfer:
    """What a stage hands to the next one on another device.

    Attributes
    ----------
    unit_ps : time of one chunk alone, ps
    units : chunks, one after another
    sm : SMs (CTAs) that it holds on the sender and on the receiver; 0 for an RDMA or copy-engine transfer
    weight : of the engine's sharing of bandwidth
    demands : resource of the program under construction to amount per chunk: the whole route, memory of both ends
    """

    unit_ps: int
    units: int = 1
    sm: int = 0
    weight: float = 1.0
    demands: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of_seconds(cls, duration_s: float, *, sm: int = 0, demands: Mapping[int, float] | None = None) -> Transfer:
        """One chunk of `duration_s`, to the nearest ps.

        Raises
        ------
        UsageError
            If the duration is not finite or negative.
        """
        return cls(ps_from_s(duration_s), sm=sm, demands=demands or {})


@dataclass(frozen=True)
class StageWork:
    """Blocks of one stage on one device; those that the schedule does not use may be left out.

    Attributes
    ----------
    forward, backward, input_grad, weight_grad : Block or None
    """

    forward: Block
    backward: Block | None = None
    input_grad: Block | None = None
    weight_grad: Block | None = None


class PipelineWork(Protocol):
    """Prices for :func:`overlapsim.schedule.pipeline_program.lower_pipeline`, asked once for each combination."""

    def stage(self, device: int, stage: int) -> StageWork:
        """Blocks of `stage` on `device`."""
        ...

    def pair(self, device: int, forward_stage: int, backward_stage: int) -> Block | None:
        """Block of an F&B pair on `device`; None runs the forward, then the backward."""
        ...

    def transfer(self, source: int, target: int, from_stage: int, to_stage: int) -> Transfer | None:
        """Transfer between two devices: activations where stages rise, else gradients; None takes no time."""
        ...


@dataclass(frozen=True)
class StageTable:
    """Prices by stage, the same on whatever device: for devices that share no resource.

    Attributes
    ----------
    stages : StageWork of each stage
    pairs : Block of each pair of (forward stage, backward stage)
    activations : Transfer from each stage to the next, one fewer than stages; empty: none takes time
    gradients : Transfer from each stage but the first to the one before; empty: none takes time

    Raises
    ------
    ProgramError
        If the number of transfers is neither zero nor one fewer than stages.

    Examples
    --------
    >>> work = StageTable((StageWork(Block(1, 10), Block(1, 20)),) * 2, activations=(Transfer(3),))
    >>> work.transfer(0, 1, 0, 1).unit_ps, work.transfer(1, 0, 1, 0)
    (3, None)
    """

    stages: Sequence[StageWork]
    pairs: Mapping[tuple[int, int], Block] = field(default_factory=dict)
    activations: Sequence[Transfer | None] = ()
    gradients: Sequence[Transfer | None] = ()

    def __post_init__(self) -> None:
        for name, given in (("activations", self.activations), ("gradients", self.gradients)):
            if len(given) not in (0, len(self.stages) - 1):
                raise ProgramError(
                    f"{len(given)} transfers of {name} for {len(self.stages)} stages; expected one fewer than stages"
                )

    def stage(self, device: int, stage: int) -> StageWork:
        """Blocks of `stage`."""
        return self.stages[stage]

    def pair(self, device: int, forward_stage: int, backward_stage: int) -> Block | None:
        """Block of an F&B pair, None where there is none."""
        return self.pairs.get((forward_stage, backward_stage))

    def transfer(self, source: int, target: int, from_stage: int, to_stage: int) -> Transfer | None:
        """Transfer between neighbouring stages."""
        if to_stage > from_stage:
            return self.activations[from_stage] if self.activations else None
        return self.gradients[to_stage] if self.gradients else None
