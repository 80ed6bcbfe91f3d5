"""Whole steps of MegaScale-MoE's evaluation, predicted: scaling, ablation, layouts, and where the time goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from overlapsim.accuracy.moe_rows import SHIFTS, Predicted, Shift, check_keys
from overlapsim.accuracy.moe_systems import CLUSTERS, MODELS, SEQUENCE, fits, model_spec, step_inputs
from overlapsim.accuracy.value_file import Figure
from overlapsim.engine import compiled
from overlapsim.engine.deadlock import raise_if_deadlocked
from overlapsim.step.assemble import assemble
from overlapsim.step.device_time import device_breakdown
from overlapsim.step.inputs import StepInputs
from overlapsim.step.replicas import replicas
from overlapsim.step.simulate import step_prices, step_schedule
from overlapsim.workload.model_count import step_flop_per_token
from overlapsim.workload.utilization import tokens_per_s, utilization

BATCH: Final = 720
"""Sequences of a step in Tables 3 and 5."""
SCALED_FROM: Final = "240"
"""GPUs that strong scaling is counted from."""
STEPS: Final[Mapping[str, str]] = {
    "baseline": "baseline",
    "sp-ep": "sp-ep",
    "inter": "inter",
    "intra": "megascale-moe",
}
"""Table 5's steps, and the system that each makes."""
LAYOUTS: Final = ("sp+ep", "tp+ep", "sp+tp", "tp+tp")
"""Figure 14's layouts (attention+experts), best first as published."""
NODE_BATCH: Final = 32
PARTS_BATCH: Final = 64
PARTS_GPUS: Final = 32
TWO: Final = ("megatron-lm", "megascale-moe")
STEP_UNITS: Final = {"iteration": ("s", "ms"), "throughput": ("tok/s",), "mfu": ("%", "ratio")}


@dataclass(frozen=True)
class Point:
    """One step at given prices.

    Attributes
    ----------
    iteration_s : of the step
    compute_s, exposed_s, other_s : GEMMs and attention; communication (and waiting for a peer) beside which nothing is
        computed; all other kernels, the optimizer, and a GPU that waits for its host
    bubble_s : of the pipeline
    """

    iteration_s: float
    compute_s: float
    exposed_s: float
    other_s: float
    bubble_s: float


@dataclass(frozen=True)
class Run:
    """One step at the middle of all prices, and with each cost family at its ends."""

    inputs: StepInputs
    points: Mapping[Shift, Point]

    def __getitem__(self, shift: Shift) -> Point:
        """The step at given ends."""
        return self.points[shift]


def points(inputs: StepInputs, *, ranges: bool = True) -> dict[Shift, Point]:
    """The step at the middle of all prices, and with each cost family at its ends."""
    prices, schedule = step_prices(inputs), step_schedule(inputs)
    copies, found = replicas(inputs)[0], dict[Shift, Point]()
    for shift in (None, *(SHIFTS if ranges else ())):
        moved = prices if shift is None else prices.at(*shift)
        program = assemble(inputs, moved, schedule, copies)
        timeline = compiled.run(program.program, contention=inputs.contention)
        raise_if_deadlocked(timeline)
        found[shift] = _point(timeline.duration_s, device_breakdown(program, timeline), inputs.layout.pp > 1)
    return found


def _point(seconds: float, kinds: Mapping[str, float], pipelined: bool) -> Point:
    exposed = sum(value for kind, value in kinds.items() if kind.startswith("exposed"))
    # Without stages nothing but a peer of a collective is waited for: a trace shows its kernel running.
    bubble = kinds["bubble"] if pipelined else 0.0
    return Point(
        seconds,
        kinds["gemm"] + kinds["attention"],
        exposed + kinds["bubble"] - bubble,
        kinds["other_compute"] + kinds["optimizer"] + kinds["host"],
        bubble,
    )


@dataclass
class Steps:
    """Predictions of rows about whole steps; each step is simulated once.

    Attributes
    ----------
    ranges : False leaves 90 % intervals out
    """

    ranges: bool = True
    _runs: dict[tuple[object, ...], Run] = field(default_factory=dict)

    def run(
        self, system: str, model: str, gpus: int, batch: int, *, gpu: str = "h800", layers: int | None = None
    ) -> Run:
        """One step of `moe_systems.step_inputs`; models of which `layers` are given are as printed."""
        key = (system, model, gpus, batch, gpu, layers)
        if key not in self._runs:
            printed = layers is not None
            inputs = step_inputs(system, model, gpus, batch, gpu=gpu, layers=layers, as_printed=printed)
            self._runs[key] = Run(inputs, points(inputs, ranges=self.ranges))
        return self._runs[key]

    def predict(self, row: Figure) -> Predicted:
        """What the model makes of a row of `GROUPS`.

        Raises
        ------
        CalibrationError
            If the row's keys, metric or unit are not those of its group.
        """
        return GROUPS[row.group](self, row)

    def of(self, run: Run, metric: str) -> Predicted:
        """Time, throughput or utilization of one run, or a part of its time."""
        inputs, batch = run.inputs, run.inputs.job.global_batch or 1
        flop, peak = step_flop_per_token(inputs.model, SEQUENCE), inputs.cluster.device.peak(inputs.model.dtype)

        def value(shift: Shift) -> float:
            point = run[shift]
            rate = tokens_per_s(point.iteration_s, batch, SEQUENCE)
            match metric:
                case "iteration":
                    return point.iteration_s
                case "throughput":
                    return rate
                case "mfu":
                    return utilization(flop, rate, inputs.layout.world_size, peak)
                case _:
                    return float(getattr(point, f"{metric}_s"))

        return Predicted.of(value, ranges=self.ranges)

    def ratio(self, over: Run, under: Run) -> Predicted:
        """Iteration time of one run over that of another, both at the same prices."""
        return Predicted.of(lambda shift: over[shift].iteration_s / under[shift].iteration_s, ranges=self.ranges)


def _scaling(steps: Steps, row: Figure) -> Predicted:
    """Table 3 (batch 720) and figure 12 (a batch of each row's own)."""
    weak = row.group == "fig12"
    needed: dict[str, tuple[str, ...]] = {"system": TWO, "gpus": ()}
    if weak:
        needed["batch"] = ()
    units = {**STEP_UNITS, "speedup": ("ratio",)} | ({} if weak else {"scaling": ("ratio",)})
    check_keys(row, needed, units)
    gpus, batch = int(row.keys["gpus"]), int(row.keys["batch"]) if weak else BATCH
    run = steps.run(row.keys["system"], "M1", gpus, batch)
    if row.metric == "speedup":
        return steps.ratio(steps.run("megatron-lm", "M1", gpus, batch), run)
    if row.metric == "scaling":
        return steps.ratio(steps.run(row.keys["system"], "M1", int(SCALED_FROM), batch), run)
    return steps.of(run, row.metric)


def _ablation(steps: Steps, row: Figure) -> Predicted:
    check_keys(row, {"step": tuple(STEPS)}, {"throughput": ("ratio",)})
    first, this = (steps.run(STEPS[name], "M1", 240, BATCH) for name in ("baseline", row.keys["step"]))
    return steps.ratio(first, this)


def _parts(steps: Steps, row: Figure) -> Predicted:
    parts = dict.fromkeys(("compute", "exposed", "other"), ("s", "ms"))
    check_keys(row, {"gpu": tuple(CLUSTERS), "system": TWO}, {**STEP_UNITS, **parts, "speedup": ("ratio",)})
    run = steps.run(row.keys["system"], "M2", PARTS_GPUS, PARTS_BATCH, gpu=row.keys["gpu"])
    if row.metric == "speedup":
        return steps.ratio(steps.run("megatron-lm", "M2", PARTS_GPUS, PARTS_BATCH, gpu=row.keys["gpu"]), run)
    return steps.of(run, row.metric)


@lru_cache
def node_layers(model: str) -> int:
    """Layers of a model in figure 14, which prints none: all, or the first half of them, and so on, that fit a node."""
    layers = model_spec(model).num_layers
    while layers > 1 and not all(
        fits(step_inputs(name, model, 8, NODE_BATCH, layers=layers, as_printed=True)) for name in LAYOUTS
    ):
        layers = -(-layers // 2)
    return layers


def _layouts(steps: Steps, row: Figure) -> Predicted:
    check_keys(row, {"model": tuple(MODELS), "layout": LAYOUTS}, {"mfu-ratio": ("ratio",)})
    best, this = (
        steps.run(layout, row.keys["model"], 8, NODE_BATCH, layers=node_layers(row.keys["model"]))
        for layout in (LAYOUTS[0], row.keys["layout"])
    )
    return steps.ratio(best, this)


GROUPS: Final = {"table3": _scaling, "fig12": _scaling, "table5": _ablation, "fig13": _parts, "fig14": _layouts}
"""Groups about whole steps, and what predicts their rows."""
