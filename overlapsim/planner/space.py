"""The space of whole-step plans: every layout, batch split and schedule that a model and a machine allow, as arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from overlapsim.errors import PlanError
from overlapsim.schedule.pipeline_kinds import SCHEDULES
from overlapsim.step.inputs import DP_OVERLAPS
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job, layout_reasons
from overlapsim.workload.model import ModelSpec, MoE
from overlapsim.workload.stages import spread_layers

Int = npt.NDArray[np.int32]
RECOMPUTES: Final = ("none", "selective", "sar", "full")
DEGREES: Final = ("tp", "sp", "cp", "ep", "etp", "pp", "vpp", "dp")
CHOICES: Final = ("zero", "sequence_parallel", "micro_batch", "recompute", "dp_overlap", "schedule", "overlap")
COLUMNS: Final = (*DEGREES, *CHOICES)
SCHEDULE_NAMES: Final = tuple(SCHEDULES)
OVERLAPS: Final = ("library", "strategies")
"""Kernels of the library one after another, or each operator's best overlap strategy."""
MOST_LAYOUTS: Final = 20_000


@dataclass(frozen=True)
class Axes:
    """Values that each axis may take.

    Attributes
    ----------
    degrees : for each of `DEGREES` but dp (which fills the machine), allowed values; None takes all that divide
    micro_batch : sequences; None takes all that divide
    zero, recompute, dp_overlap, schedule, overlap : values tried
    sequence_parallel : values tried with tp above 1
    uneven : whether layers that do not divide are spread as evenly as can be
    """

    degrees: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    micro_batch: tuple[int, ...] | None = None
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    dp_overlap: tuple[str, ...] = DP_OVERLAPS
    schedule: tuple[str, ...] = ("1f1b", "interleaved", "gpipe", "zb_h1")
    overlap: tuple[str, ...] = OVERLAPS
    sequence_parallel: tuple[bool, ...] = (True, False)
    uneven: bool = False


@dataclass(frozen=True)
class Constraint:
    """A rule on one column, such as ``tp<=8``."""

    column: str
    operator: str
    value: int

    @classmethod
    def parse(cls, text: str) -> Constraint:
        """Read ``tp<=8``, ``pp=4``, ``micro_batch>=2`` ...

        Raises
        ------
        PlanError
            If the text is no such rule.
        """
        for sign in _COMPARE:
            name, found, value = text.partition(sign)
            if found:
                if name.strip() in COLUMNS and value.strip().isdecimal():
                    return cls(name.strip(), sign, int(value))
                break
        raise PlanError(
            f"constraint {text!r} is not understood; expected COLUMN<=N, COLUMN>=N or COLUMN=N with one of "
            f"{', '.join((*DEGREES, 'zero', 'micro_batch'))}",
            exit_code=2,
        )

    def holds(self, values: Int) -> npt.NDArray[np.bool_]:
        """Which values keep the rule."""
        kept: npt.NDArray[np.bool_] = _COMPARE[self.operator](values, self.value)
        return kept


_COMPARE: Final[Mapping[str, Callable[[Int, int], npt.NDArray[np.bool_]]]] = {
    "<=": np.less_equal,
    ">=": np.greater_equal,
    "=": np.equal,
}


@dataclass(frozen=True, eq=False)
class Space:
    """Candidates as rows.

    Attributes
    ----------
    model, sequence, global_batch, world_size : what all of them share
    columns : int32 arrays of one length, by name of `COLUMNS`; recompute, dp_overlap, schedule and overlap hold
        positions in `RECOMPUTES`, `DP_OVERLAPS`, `SCHEDULE_NAMES` and `OVERLAPS`
    pruned : number of candidates left out, by reason
    """

    model: ModelSpec
    sequence: int
    global_batch: int
    world_size: int
    columns: Mapping[str, Int]
    pruned: Mapping[str, int]
    uneven: bool = False

    def __len__(self) -> int:
        return len(self.columns["tp"])

    def layout(self, row: int) -> Layout:
        """Layout of one candidate."""
        c = {name: int(self.columns[name][row]) for name in COLUMNS}
        return Layout(
            tp=c["tp"], sp=c["sp"], cp=c["cp"], ep=c["ep"], etp=c["etp"], pp=c["pp"], vpp=c["vpp"], dp=c["dp"],
            zero=c["zero"], sequence_parallel=bool(c["sequence_parallel"]),
        )  # fmt: skip

    def job(self, row: int) -> Job:
        """Batch and stages of one candidate."""
        micro_batch = int(self.columns["micro_batch"][row])
        chunks = int(self.columns["pp"][row]) * int(self.columns["vpp"][row])
        uneven = spread_layers(self.model.num_layers, chunks) if self.model.num_layers % chunks else None
        return Job(self.sequence, micro_batch, self.global_batch, self.world_size, uneven)

    def distinct(self, names: Sequence[str]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """First row of each combination of some columns, and the number of the combination that each row has."""
        code = np.zeros(len(self), dtype=np.int64)
        for name in names:
            values = self.columns[name]
            code = code * (int(values.max(initial=0)) + 1) + values
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        return first, inverse.reshape(-1)

    def take(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_], reason: str = "") -> Space:
        """Only these rows; the others count as pruned for `reason`."""
        kept = {name: values[rows] for name, values in self.columns.items()}
        gone = len(self) - len(kept["tp"])
        pruned = dict(self.pruned)
        if gone and reason:
            pruned[reason] = pruned.get(reason, 0) + gone
        return replace(self, columns=kept, pruned=pruned)


def enumerate_space(
    model: ModelSpec,
    world_size: int,
    global_batch: int,
    sequence: int,
    axes: Axes,
    constraints: Sequence[Constraint] = (),
) -> Space:
    """All candidates of a request.

    Layouts are checked one by one with the rules of `layout_rules`; what
    divides them further (micro-batch, schedule, recompute ...) is multiplied
    out in arrays.

    Raises
    ------
    PlanError
        If the axes leave more layouts than can be looked at.
    """
    pruned: dict[str, int] = {}
    blocks = []
    for layout in _layouts(model, world_size, axes, constraints):
        job = Job(sequence, 1, None, world_size, _stages(model, layout, axes))
        reasons = layout_reasons(layout, model, job)
        if reasons:
            key = reasons[0].partition(";")[0].split(" is ")[0].split(" of ")[0][:60]
            pruned[key] = pruned.get(key, 0) + 1
            continue
        block = _multiply(model, layout, global_batch, axes)
        if block is None:
            pruned["batch does not divide"] = pruned.get("batch does not divide", 0) + 1
            continue
        blocks.append(block)
    columns = {
        name: np.concatenate([block[name] for block in blocks]) if blocks else np.zeros(0, np.int32) for name in COLUMNS
    }
    space = Space(model, sequence, global_batch, world_size, columns, pruned, axes.uneven)
    for rule in constraints:
        name = f"constraint {rule.column}{rule.operator}{rule.value}"
        space = space.take(rule.holds(space.columns[rule.column]), name)
    return space


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _layouts(model: ModelSpec, world: int, axes: Axes, constraints: Sequence[Constraint]) -> list[Layout]:
    experts = next((layer.mlp.num_experts for layer in model.layers if isinstance(layer.mlp, MoE)), 0)
    heads = math.gcd(*(layer.attention.num_heads for layer in model.layers))
    rules = {rule.column: [r for r in constraints if r.column == rule.column] for rule in constraints}

    def allowed(name: str, values: Sequence[int]) -> list[int]:
        given = axes.degrees.get(name)
        kept = [v for v in values if given is None or v in given]
        array = np.array(kept, dtype=np.int32)
        for rule in rules.get(name, ()):
            array = array[rule.holds(array)]
        return [int(value) for value in array]

    found = []
    whole = _divisors(world)
    for tp in allowed("tp", [d for d in whole if heads % d == 0]):
        for pp in allowed("pp", [d for d in whole if world % (tp * d) == 0 and d <= model.num_layers]):
            rest = world // (tp * pp)
            for sp in allowed("sp", [d for d in _divisors(rest) if (heads // tp) % d == 0 and (tp == 1 or d == 1)]):
                for cp in allowed("cp", [d for d in _divisors(rest // sp) if d & (d - 1) == 0 and d <= 64]):
                    found += _inner(model, tp, pp, sp, cp, rest // (sp * cp), experts, axes, allowed)
                    if len(found) > MOST_LAYOUTS:
                        raise PlanError(
                            f"more than {MOST_LAYOUTS} layouts; narrow the request with --constraint or --fix"
                        )
    return found


def _inner(
    model: ModelSpec,
    tp: int,
    pp: int,
    sp: int,
    cp: int,
    dp: int,
    experts: int,
    axes: Axes,
    allowed: Callable[[str, Sequence[int]], list[int]],
) -> list[Layout]:
    found = []
    chunks = model.num_layers // pp
    vpps = [d for d in range(1, chunks + 1) if model.num_layers % (pp * d) == 0] if pp > 1 else [1]
    if not vpps and axes.uneven:
        vpps = [1]
    expert_ranks = tp * sp * cp * dp
    eps = [d for d in _divisors(expert_ranks) if experts % d == 0] if experts else [1]
    for vpp in allowed("vpp", vpps):
        for ep in allowed("ep", eps):
            for etp in allowed("etp", sorted({1, tp}) if experts else [tp]):
                if expert_ranks % (ep * etp):
                    continue
                for sequence_parallel in axes.sequence_parallel if tp > 1 else (True,):
                    found.append(
                        Layout(
                            tp=tp, sp=sp, cp=cp, ep=ep, etp=etp, pp=pp, vpp=vpp, dp=dp,
                            sequence_parallel=sequence_parallel,
                        )
                    )  # fmt: skip
    return found


def _stages(model: ModelSpec, layout: Layout, axes: Axes) -> tuple[int, ...] | None:
    chunks = layout.pp * layout.vpp
    if axes.uneven and model.num_layers % chunks:
        return spread_layers(model.num_layers, chunks)
    return None


def _multiply(model: ModelSpec, layout: Layout, global_batch: int, axes: Axes) -> dict[str, Int] | None:
    """Candidates of one layout, multiplied out."""
    if global_batch % layout.dp:
        return None
    sequences = global_batch // layout.dp
    batches = [b for b in _divisors(sequences) if axes.micro_batch is None or b in axes.micro_batch]
    replicas = layout.dense_replicas
    zeros = [z for z in axes.zero if replicas > 1 or z == 0]
    overlaps = [DP_OVERLAPS.index(o) for o in axes.dp_overlap] if replicas > 1 else [DP_OVERLAPS.index("none")]
    recomputes = [RECOMPUTES.index(r) for r in axes.recompute]
    kernels = [OVERLAPS.index(o) for o in axes.overlap]
    rows = [(b, s) for b in batches for s in _schedules(layout, sequences // b, axes)]
    if not rows:
        return None
    pairs = np.array(rows, dtype=np.int32)
    grids = np.meshgrid(np.arange(len(pairs)), zeros, overlaps, recomputes, kernels, indexing="ij")
    at, zero, overlap, recompute, kernel = (grid.reshape(-1).astype(np.int32) for grid in grids)
    # Gathering parameters early means something only where they are sharded.
    keep = (zero > 0) | (overlap != DP_OVERLAPS.index("both"))
    at, zero, overlap, recompute, kernel = at[keep], zero[keep], overlap[keep], recompute[keep], kernel[keep]
    shared = {name: np.full(len(at), getattr(layout, name), np.int32) for name in DEGREES}
    return {
        **shared,
        "zero": zero,
        "sequence_parallel": np.full(len(at), int(layout.sequence_parallel), np.int32),
        "micro_batch": pairs[at, 0],
        "recompute": recompute,
        "dp_overlap": overlap,
        "schedule": pairs[at, 1],
        "overlap": kernel,
    }


def _schedules(layout: Layout, micro_batches: int, axes: Axes) -> list[int]:
    """Schedules that exist for a pipeline; without one there is a single order."""
    pp, vpp = layout.pp, layout.vpp
    if pp == 1:
        return [SCHEDULE_NAMES.index("1f1b")]
    able = []
    for name in axes.schedule:
        kind = SCHEDULES[name]
        if kind.stages_per_device is None:
            if vpp > 1 and micro_batches % pp == 0:
                able.append(name)
        elif kind.stages_per_device == vpp and kind.copies == 1:
            if name == "1f1b" or micro_batches >= 2 * pp:
                able.append(name)
        elif kind.copies == 2 and vpp == 1 and pp % 2 == 0 and micro_batches >= 2 * pp and micro_batches % 2 == 0:
            able.append(name)
    return [SCHEDULE_NAMES.index(name) for name in able]
