"""The space of whole-step plans: every layout, batch split and schedule that a model and a machine allow, as arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from overlapsim.errors import PlanError
from overlapsim.planner.pruned_words import shared_reason
from overlapsim.schedule.pipeline_kinds import SCHEDULES
from overlapsim.step.inputs import DP_OVERLAPS, DpOverlap
from overlapsim.workload.dispatchers import Dispatcher
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job, layout_reasons
from overlapsim.workload.model import ModelSpec, MoE
from overlapsim.workload.stages import spread_layers

Int = npt.NDArray[np.int32]
RECOMPUTES: Final = ("none", "selective", "sar", "full")
DEGREES: Final = ("tp", "sp", "cp", "ep", "etp", "pp", "vpp", "dp")
SCHEDULE_NAMES: Final = tuple(SCHEDULES)
TWO_WAY: Final = ("zbv", "dualpipe", "dualpipev")
"""Schedules that begin at both ends of a pipeline, or come back to the first device."""
NAMED: Final[Mapping[str, Sequence[str]]] = {
    "recompute": RECOMPUTES,
    "dp_overlap": DP_OVERLAPS,
    "schedule": SCHEDULE_NAMES,
}
"""Columns that hold positions in a list of names."""
OVERLAPS: Final = ("library", "strategies")
"""Kernels of the library one after another, or each operator's best overlap strategy."""
DISPATCHERS: Final[tuple[Dispatcher, ...]] = ("all_to_all", "all_gather", "hierarchical", "deepep")
"""Those that training frameworks have for any model and machine."""
MOST_LAYOUTS: Final = 20_000
MOST_CP: Final = 64
# Columns of a layout without its chunks, and what divides it further.
_HEAD: Final = ("tp", "sp", "cp", "ep", "etp", "pp", "dp", "sequence_parallel")
_TAIL: Final = ("micro_batch", "vpp", "schedule", "zero", "dp_overlap", "recompute")
COLUMNS: Final = (*_HEAD, *_TAIL)


@dataclass(frozen=True)
class Axes:
    """Values that each axis may take.

    Attributes
    ----------
    degrees : for each of `DEGREES`, allowed values; None takes all that divide
    micro_batch : sequences; None takes all that divide
    zero, recompute, dp_overlap, schedule, overlap : values tried; by default no schedule that needs another's memory
        without being faster (GPipe), nor those that few frameworks have
    dispatcher : ways to experts that are tried on the best layouts
    sequence_parallel : values tried with tp above 1
    uneven : whether layers that do not divide are spread as evenly as can be
    """

    degrees: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    micro_batch: tuple[int, ...] | None = None
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    dp_overlap: tuple[DpOverlap, ...] = DP_OVERLAPS
    schedule: tuple[str, ...] = ("1f1b", "interleaved", "zb_h1")
    overlap: tuple[str, ...] = OVERLAPS
    dispatcher: tuple[Dispatcher, ...] = DISPATCHERS
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
        """Read ``tp<=8``, ``pp=4``, ``micro_batch>=2``, ``recompute=full`` ...

        Raises
        ------
        PlanError
            If the text is no such rule.

        Examples
        --------
        >>> str(Constraint.parse("tp <= 8")), str(Constraint.parse("schedule=1f1b"))
        ('tp<=8', 'schedule=1f1b')
        """
        for sign in _COMPARE:
            name, found, value = (part.strip() for part in text.partition(sign))
            if found:
                if name in NAMED and sign == "=" and value in NAMED[name]:
                    return cls(name, sign, NAMED[name].index(value))
                if name in COLUMNS and name not in NAMED and value.isascii() and value.isdecimal():
                    return cls(name, sign, int(value))
                break
        names = ", ".join(f"{name}={'|'.join(values)}" for name, values in NAMED.items())
        raise PlanError(
            f"constraint {text!r} is not understood; expected COLUMN<=N, COLUMN>=N or COLUMN=N with a column of "
            f"{', '.join(name for name in COLUMNS if name not in NAMED)}, or one of {names}",
            exit_code=2,
        )

    def __str__(self) -> str:
        """Text that `parse` reads back."""
        value = NAMED[self.column][self.value] if self.column in NAMED else str(self.value)
        return f"{self.column}{self.operator}{value}"

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
    columns : int32 arrays of one length, by name of `COLUMNS`; those of `NAMED` hold positions in its lists
    pruned : number of candidates (of layouts, where a layout is refused whole) left out, by reason
    uneven : whether layers that do not divide are spread
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
    """All candidates of a request, those of one shape behind each other.

    Layouts are checked with the rules of `layout_rules`, once for all that
    differ in what the rules do not look at; what divides them further
    (chunks, micro-batch, schedule, recompute ...) is multiplied out in arrays.

    Raises
    ------
    PlanError
        If the axes leave more layouts than can be looked at.
    """
    pruned: dict[str, int] = {}
    tails: dict[tuple[int, ...], dict[str, Int]] = {}
    verdicts: dict[tuple[object, ...], str] = {}
    heads: list[Layout] = []
    parts: list[dict[str, Int]] = []
    for layout in _layouts(model, world_size, axes, constraints):
        reason = _reason(layout, model, sequence, verdicts)
        if not reason and global_batch % layout.dp:
            reason = "dp does not divide the global batch"
        if reason:
            pruned[reason] = pruned.get(reason, 0) + 1
            continue
        key = (layout.pp, layout.dp, max(layout.dense_replicas, layout.edp) > 1)
        if key not in tails:
            tails[key] = _tail(model, layout, global_batch, axes, replicated=key[2])
        if len(tails[key]["vpp"]):
            heads.append(layout)
            parts.append(tails[key])
    counts = [len(part["vpp"]) for part in parts]
    columns = {
        name: np.repeat(np.array([getattr(layout, name) for layout in heads], np.int32), counts) for name in _HEAD
    }
    for name in _TAIL:
        columns[name] = np.concatenate([part[name] for part in parts]) if parts else np.zeros(0, np.int32)
    space = Space(model, sequence, global_batch, world_size, columns, pruned, axes.uneven)
    for rule in constraints:
        space = space.take(rule.holds(space.columns[rule.column]), f"constraint {rule}")
    return space


def _reason(layout: Layout, model: ModelSpec, sequence: int, known: dict[tuple[object, ...], str]) -> str:
    """First reason against a layout; its pipeline and replicas are looked at elsewhere."""
    key = (layout.tp, layout.sp, layout.cp, layout.ep, layout.etp, layout.sequence_parallel)
    if key not in known:
        job = Job(sequence, 1, None, layout.world_size, spread_layers(model.num_layers, layout.pp * layout.vpp))
        reasons = layout_reasons(layout, model, job)
        known[key] = shared_reason(reasons[0]) if reasons else ""
    return known[key]


def divisors(number: int) -> list[int]:
    """Divisors of a number, rising."""
    return [d for d in range(1, number + 1) if number % d == 0]


def _layouts(model: ModelSpec, world: int, axes: Axes, constraints: Sequence[Constraint]) -> list[Layout]:
    experts = math.gcd(*(layer.mlp.num_experts for layer in model.layers if isinstance(layer.mlp, MoE)))
    heads = math.gcd(*(layer.attention.num_heads for layer in model.layers))

    def allowed(name: str, values: Sequence[int]) -> list[int]:
        given = axes.degrees.get(name)
        array = np.array([v for v in values if given is None or v in given], dtype=np.int32)
        for rule in constraints:
            if rule.column == name:
                array = array[rule.holds(array)]
        return [int(value) for value in array]

    found: list[Layout] = []
    whole = divisors(world)
    for tp in allowed("tp", [d for d in whole if heads % d == 0]):
        for pp in allowed("pp", [d for d in whole if world % (tp * d) == 0 and _chunks(model, d, axes)]):
            rest = divisors(world // (tp * pp))
            for sp in allowed("sp", [d for d in rest if (heads // tp) % d == 0 and (tp == 1 or d == 1)]):
                for cp in allowed("cp", [d for d in divisors(rest[-1] // sp) if d & (d - 1) == 0 and d <= MOST_CP]):
                    for dp in allowed("dp", [rest[-1] // (sp * cp)]):
                        found += _inner(Layout(tp=tp, sp=sp, cp=cp, pp=pp, dp=dp), experts, axes, allowed)
                    if len(found) > MOST_LAYOUTS:
                        raise PlanError(
                            f"more than {MOST_LAYOUTS} layouts on {world} GPUs; narrow the request with --constraint "
                            "or --fix",
                            exit_code=2,
                        )
    return found


def _inner(
    dense: Layout, experts: int, axes: Axes, allowed: Callable[[str, Sequence[int]], list[int]]
) -> Iterator[Layout]:
    """Layouts of the experts within one of the dense grid."""
    ranks = dense.world_size // dense.pp
    parallel = axes.sequence_parallel if dense.tp > 1 else (True,)
    for ep in allowed("ep", [d for d in divisors(ranks) if experts % d == 0] if experts else [1]):
        for etp in allowed("etp", sorted({1, dense.tp}) if experts else [dense.tp]):
            if ranks % (ep * etp) == 0:
                yield from (replace(dense, ep=ep, etp=etp, sequence_parallel=on) for on in parallel)


def _chunks(model: ModelSpec, pp: int, axes: Axes) -> list[int]:
    """Chunks a stage into which layers can be dealt; uneven stages have one."""
    if pp == 1:
        return [1]
    even = [d for d in range(1, model.num_layers // pp + 1) if model.num_layers % (pp * d) == 0]
    return even or ([1] if axes.uneven and pp <= model.num_layers else [])


def _tail(model: ModelSpec, layout: Layout, global_batch: int, axes: Axes, *, replicated: bool) -> dict[str, Int]:
    """What divides a layout further, multiplied out; candidates of one micro-batch stand together."""
    sequences = global_batch // layout.dp
    given = axes.degrees.get("vpp")
    chunks = [d for d in _chunks(model, layout.pp, axes) if given is None or d in given]
    orders = [
        (size, vpp, schedule)
        for size in divisors(sequences)
        if axes.micro_batch is None or size in axes.micro_batch
        for vpp in chunks
        for schedule in _schedules(layout.pp, vpp, sequences // size, axes)
    ]
    states = [(zero, DP_OVERLAPS.index(overlap)) for zero, overlap in _states(axes, replicated=replicated)]
    recomputes = [RECOMPUTES.index(name) for name in axes.recompute]
    rows = np.array([(*order, 0, 0, 0) for order in orders], dtype=np.int32).reshape(-1, 6)
    inner = np.array([(*state, recompute) for recompute in recomputes for state in states], dtype=np.int32)
    table = np.repeat(rows, len(inner), axis=0)
    table[:, 3:] = np.tile(inner.reshape(-1, 3), (len(rows), 1))
    return dict(zip(_TAIL, np.ascontiguousarray(table.T), strict=True))


def _states(axes: Axes, *, replicated: bool) -> Iterator[tuple[int, DpOverlap]]:
    """ZeRO levels with what of their traffic is overlapped, each different program once."""
    if not replicated:
        yield 0, "none"
        return
    for zero in axes.zero:
        for overlap in axes.dp_overlap:
            # Parameters gathered ahead mean something only where they are sharded; level 3 has its own traffic.
            if zero == 0 and overlap == "both" and len(axes.dp_overlap) > 1:
                continue
            if zero < 3 or overlap == axes.dp_overlap[0]:
                yield zero, overlap


def _schedules(pp: int, vpp: int, micro_batches: int, axes: Axes) -> list[int]:
    """Schedules that exist for a pipeline; without one there is a single order."""
    if pp == 1:
        return [SCHEDULE_NAMES.index("1f1b")]
    return [SCHEDULE_NAMES.index(name) for name in axes.schedule if _exists(name, pp, vpp, micro_batches)]


def _exists(name: str, pp: int, vpp: int, micro_batches: int) -> bool:
    kind = SCHEDULES[name]
    if vpp != (kind.stages_per_device or max(vpp, 2)):
        return False
    if vpp > 1 and micro_batches % pp:
        return False
    if kind.copies == 2 and (pp % 2 or micro_batches % 2):
        return False
    # Both directions of a V or a double pipeline must be full.
    return name not in TWO_WAY or micro_batches >= 2 * pp
