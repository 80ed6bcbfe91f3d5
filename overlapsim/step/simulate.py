"""`simulate_step`: a model in a layout on a machine -> step time with its range, where it goes, and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from overlapsim.cost.base import Family
from overlapsim.cost.prices import PriceBook
from overlapsim.engine import compiled
from overlapsim.engine.deadlock import raise_if_deadlocked
from overlapsim.engine.timeline import Timeline
from overlapsim.errors import LayoutError
from overlapsim.plan import Finding
from overlapsim.schedule.pipeline import PipelineSchedule
from overlapsim.schedule.pipeline_kinds import SCHEDULES, make_schedule
from overlapsim.schedule.pipeline_memory import peak_in_flight, peak_kept
from overlapsim.step.assemble import StepProgram, assemble
from overlapsim.step.compressed import compression_findings
from overlapsim.step.device_time import device_breakdown
from overlapsim.step.findings import step_findings
from overlapsim.step.inputs import StepInputs
from overlapsim.step.machine import machine_prices
from overlapsim.step.replicas import replicas
from overlapsim.step.routed import expert_load
from overlapsim.step.sharded import sharded_findings
from overlapsim.workload.memory import Memory, MemoryModel
from overlapsim.workload.model_count import step_flop_per_token
from overlapsim.workload.utilization import tokens_per_s, utilization

FAMILIES: Final[tuple[Family, ...]] = ("gemm", "attention", "memory", "collective", "launch")
ENDS: Final[tuple[Literal["low", "high"], ...]] = ("low", "high")


@dataclass(frozen=True, eq=False)
class StepResult:
    """The answer for one training step.

    Attributes
    ----------
    inputs : what was asked
    step_time_s, low_s, high_s : prediction and central 90 % interval
    breakdown_s : seconds of each kind (`categories.KINDS`) on the device that ends last; their sum is `step_time_s`
    memory : of each pipeline device's GPUs
    tokens_per_s, mfu, hfu, model_flop : of all GPUs; utilization of the dense peak by model and by hardware FLOP
    timeline, program : what happened, and what its tasks are
    findings : what was believed and not measured
    shifts_s : what the step gains or loses with one cost family at a time at its 5 % and its 95 % value (of time);
        empty without ranges
    """

    inputs: StepInputs
    step_time_s: float
    low_s: float
    high_s: float
    breakdown_s: Mapping[str, float]
    memory: tuple[Memory, ...]
    tokens_per_s: float
    mfu: float
    hfu: float
    model_flop: float
    timeline: Timeline
    program: StepProgram
    findings: tuple[Finding, ...] = ()
    shifts_s: Mapping[Family, tuple[float, float]] = field(default_factory=dict)

    @property
    def fullest(self) -> Memory:
        """Memory of the device that holds most."""
        return max(self.memory, key=lambda memory: memory.total_bytes)


def simulate_step(inputs: StepInputs, *, ranges: bool = True, models: dict[object, object] | None = None) -> StepResult:
    """Predict one training step.

    Parameters
    ----------
    inputs : the question
    ranges : False leaves 90 % intervals out (low and high equal the value)
    models : results of cost models, shared between calls on one cluster

    Raises
    ------
    LayoutError
        If the schedule does not exist for the layout and batch.
    """
    prices = step_prices(inputs, models)
    schedule = step_schedule(inputs)
    program, timeline = _run(inputs, prices, schedule)
    seconds = timeline.duration_s
    shifts: dict[Family, tuple[float, float]] = {}
    for family in FAMILIES if ranges else ():
        low_s, high_s = (_run(inputs, prices.at(family, end), schedule)[1].duration_s for end in ENDS)
        shifts[family] = (low_s - seconds, high_s - seconds)
    low = sum(min(0.0, shift) ** 2 for pair in shifts.values() for shift in pair)
    high = sum(max(0.0, shift) ** 2 for pair in shifts.values() for shift in pair)
    rate = tokens_per_s(seconds, inputs.job.global_batch or 1, inputs.job.seq_len)
    model_flop = step_flop_per_token(inputs.model, inputs.job.seq_len)
    hardware_flop = step_flop_per_token(
        inputs.model, inputs.job.seq_len, recompute=_counted(inputs.recompute.granularity)
    )
    memory = step_memory(inputs, schedule)
    pieces = program.pieces.values()
    findings = [*step_findings(inputs, prices, memory), *replicas(inputs)[1], *sharded_findings(inputs)]
    findings += compression_findings(inputs)
    findings += [finding for piece in pieces for finding in piece.findings]
    devices, peak = inputs.layout.world_size, inputs.cluster.device.peak(inputs.model.dtype)
    return StepResult(
        inputs,
        seconds,
        max(0.0, seconds - low**0.5),
        seconds + high**0.5,
        device_breakdown(program, timeline),
        memory,
        rate,
        utilization(model_flop, rate, devices, peak),
        utilization(hardware_flop, rate, devices, peak),
        model_flop * (inputs.job.global_batch or 1) * inputs.job.seq_len,
        timeline,
        program,
        tuple(dict.fromkeys(findings)),
        shifts,
    )


def step_schedule(inputs: StepInputs) -> PipelineSchedule:
    """Pipeline schedule of the step.

    Raises
    ------
    LayoutError
        If it does not exist for these numbers, or has another number of stages than the layout has chunks.
    """
    name, layout = inputs.schedule_name, inputs.layout
    own = SCHEDULES[name].stages_per_device is None
    schedule = make_schedule(name, layout.pp, inputs.num_micro_batches, stages_per_device=layout.vpp if own else None)
    if schedule.num_stages != layout.pp * layout.vpp:
        raise LayoutError(
            f"schedule {name!r} has {schedule.num_stages} stages and pp={layout.pp}, vpp={layout.vpp} make "
            f"{layout.pp * layout.vpp} chunks; expected as many: vpp is the stages of a device"
        )
    return schedule


def step_prices(inputs: StepInputs, models: dict[object, object] | None = None) -> PriceBook:
    """Prices of the machine, with the layout's groups placed on it and the clock of a long run."""
    return machine_prices(
        inputs.cluster,
        inputs.layout,
        rank_order=inputs.rank_order,
        rings=inputs.rings,
        sustained_clock=inputs.sustained_clock,
        models=models,
    )


def step_seconds(inputs: StepInputs, prices: PriceBook, schedule: PipelineSchedule | None = None) -> float:
    """Time of a step at given prices: a what-if, without ranges and breakdown.

    Parameters
    ----------
    schedule : the step's, where it is at hand
    """
    return _run(inputs, prices, schedule or step_schedule(inputs))[1].duration_s


def step_memory(inputs: StepInputs, schedule: PipelineSchedule) -> tuple[Memory, ...]:
    """Peak memory of a GPU of each pipeline device."""
    load = expert_load(inputs)
    model = MemoryModel(inputs.model, inputs.job, inputs.recipe, inputs.recompute, inputs.precision, load)
    # Parameters that stay whole over the step are those of ZeRO 2.
    layout = inputs.layout if inputs.sharded or inputs.layout.zero < 3 else replace(inputs.layout, zero=2)
    pp = schedule.num_devices
    tensors = [model.chunk_tensors(layout, device) for device in range(pp)]
    size_of = [inputs.recompute.kept_bytes(tensors[s % pp][s // pp]) for s in range(schedule.num_stages)]
    # Peaks of stages do not come at one moment; what a device keeps at once does, until the last half of a backward.
    kept, counts = peak_kept(schedule, size_of), peak_in_flight(schedule)
    found = []
    for device in range(pp):
        held = [
            [s for s in range(schedule.num_stages) if schedule.placement[copy, s] == device]
            for copy in range(schedule.num_copies)
        ]
        apart = sum(counts[copy, s] * size_of[s] for copy, stages in enumerate(held) for s in stages)
        at_once = float(kept[device] / apart) if apart else 1.0
        # A second copy of the model runs the other way: its stage is another one's.
        found.append(
            model.together(
                model.stage(
                    layout,
                    stages[0] if schedule.num_copies > 1 else device,
                    [at_once * float(counts[copy, s]) for s in stages],
                )
                for copy, stages in enumerate(held)
            )
        )
    return tuple(found)


def _run(inputs: StepInputs, prices: PriceBook, schedule: PipelineSchedule) -> tuple[StepProgram, Timeline]:
    program = assemble(inputs, prices, schedule, replicas(inputs)[0])
    timeline = compiled.run(program.program, contention=inputs.contention)
    raise_if_deadlocked(timeline)
    return program, timeline


def _counted(granularity: str) -> Literal["none", "selective", "full"]:
    return "full" if granularity == "full" else ("selective" if granularity == "selective" else "none")
