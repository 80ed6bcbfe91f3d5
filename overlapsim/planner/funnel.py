"""Best bound first: every candidate stands in one queue by what it cannot go below, and is looked at closer in turn."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from overlapsim.errors import LayoutError, StrategyError
from overlapsim.planner.layer_times import PAIR_GROUPS, Hides
from overlapsim.planner.layout_bounds import FAMILY, SHARDED, LayoutBounds, Rows
from overlapsim.planner.pair_choice import PairChooser
from overlapsim.planner.pipeline_path import PipelinePaths
from overlapsim.planner.screen import PAIRED, SPLIT, Float, is_schedule
from overlapsim.planner.space import Space
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import StagePieces
from overlapsim.step.simulate import step_memory, step_seconds
from overlapsim.strategy.compose import Composition
from overlapsim.workload.build import Which

NO_STRATEGY: Final = Composition()
PLAN: Final = ("tp", "sp", "cp", "ep", "etp", "pp", "dp")
"""Columns by which plans are told apart: other settings of one layout are its twins."""
_MEMORY: Final = (*PLAN, "sequence_parallel", "micro_batch", "vpp", "schedule", "recompute")
_ALL: Final = (*_MEMORY, "zero", "dp_overlap")
EVERYWHERE: Final = ("all_to_all", "all_gather")
"""Dispatchers of the library's collectives, which run on any machine."""
HIDES: Final[tuple[Hides, Hides]] = ("nothing", "pairs")
"""Of candidates without, and with strategies."""
_WHOLE: Final[tuple[Which, ...]] = ("backward",)
_HALVES: Final[tuple[Which, ...]] = ("input_grad", "weight_grad")
_PASSES: Final[tuple[Which, ...]] = ("forward", *_WHOLE, *_HALVES)


@dataclass(frozen=True, eq=False)
class Ran:
    """One candidate that the engine ran.

    Attributes
    ----------
    row : in the space
    composition : strategies in it
    bound_s, seconds : what was known before, and the engine's time
    """

    row: int
    composition: Composition
    bound_s: float
    seconds: float


@dataclass(frozen=True, eq=False)
class _Some:
    """Candidates that are looked at together.

    Attributes
    ----------
    rows, bounds : which, and what each cannot go below; the least first is not asked for
    strategies : whether with overlap strategies
    composition : which, once they are chosen
    """

    rows: Rows
    bounds: Float
    strategies: bool = False
    composition: Composition = NO_STRATEGY

    def part(self, places: Rows, bounds: Float | None = None) -> _Some:
        """Some of them, with better bounds where given."""
        return replace(self, rows=self.rows[places], bounds=(self.bounds if bounds is None else bounds)[places])


Stage = Callable[[_Some], None]


@dataclass(eq=False)
class Funnel:
    """Looks closer at candidates, the least bound first, until no other can be among the best.

    Attributes
    ----------
    bounds : of the space
    step : makes the step of a row with a composition
    limit_bytes : memory of a GPU that may be used
    top : plans that are asked for, told apart by `PLAN`
    overlap : whether strategies may be chosen, and the library's kernels used
    models : results of cost models
    chooser : of strategies for tensor-parallel pairs
    say : told now and then how far it is
    """

    bounds: LayoutBounds
    step: Callable[[int, Composition], StepInputs]
    limit_bytes: float
    top: int
    overlap: tuple[bool, bool]
    models: dict[object, object]
    chooser: PairChooser
    say: Callable[[str], None]
    ran: list[Ran] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Candidates that were left out late, by reason."""

    def __post_init__(self) -> None:
        self._queue: list[tuple[float, int, Stage, _Some]] = []
        self._number = itertools.count()
        self._paths = PipelinePaths()
        self._best: dict[tuple[int, ...], float] = {}
        self._serial = self._limit = float("inf")
        self._fits: dict[tuple[int, ...], bool] = {}
        self._done: set[tuple[object, ...]] = set()
        self._compositions: dict[tuple[object, ...], Composition] = {}
        self.refused = ""
        """Why a dispatcher was refused; empty where none was."""

    @property
    def space(self) -> Space:
        """Candidates."""
        return self.bounds.space

    def run(self, bounds: Float) -> None:
        """Search all candidates, whose bounds by hardware are given."""
        for rows in self.bounds.families():
            self._push(self._family, _Some(rows, bounds[rows]))
        while self._queue and self._queue[0][0] < max(self._limit, self._serial if self.overlap[0] else 0.0):
            bound, _, stage, some = heapq.heappop(self._queue)
            if self._wanted(bound, some):
                stage(some)

    def run_all(self) -> None:
        """Run everything that fits, whatever its bound: to check what the bounds leave out."""
        for row in range(len(self.space)):
            rows, bound = np.array([row]), np.zeros(1)
            for strategies in self._variants(row):
                some = _Some(rows, bound, strategies)
                if strategies:
                    composition = self._composition(some)
                    if composition is None:
                        self.counts["no strategy applies"] += 1
                        continue
                    some = replace(some, composition=composition)
                self._engine(some)

    # Stages, each looking closer than the one before

    def _family(self, some: _Some) -> None:
        """Price the layers."""
        row, variants = int(some.rows[0]), tuple(self._variants(int(some.rows[0])))
        for strategies in variants:
            try:
                layered = self.bounds.layered(some.rows, hides=HIDES[strategies])
            except LayoutError as error:
                # Kernels that write to peers need links to all of them; whatever else is refused must not be hidden.
                if self.bounds.inputs.recipe.dispatcher in EVERYWHERE or self.space.columns["ep"][row] == 1:
                    raise
                self.refused = str(error)
                self.counts["the machine has no kernels of the dispatcher"] += len(some.rows) * len(variants)
                return
            better = np.maximum(some.bounds, layered)
            every = replace(some, strategies=strategies)
            for places in self.bounds.shapes(some.rows):
                self._push(self._shape, every.part(places, better))

    def _shape(self, some: _Some) -> None:
        """Price what stands between and behind the layers."""
        better = np.maximum(some.bounds, self.bounds.priced(some.rows, hides=HIDES[some.strategies]))
        if some.strategies:
            for places in self._alike(some.rows, ("recompute",)):
                self._push(self._choice, some.part(places, better))
        else:
            self._push_pipelines(replace(some, bounds=better))

    def _choice(self, some: _Some) -> None:
        """Choose strategies, and simulate layers with them."""
        composition = self._composition(some)
        if composition is None:
            self.counts["no strategy applies"] += len(some.rows)
            return
        some = replace(some, composition=composition)
        c, better = self.space.columns, some.bounds
        plain = (c["zero"][some.rows] != SHARDED) & ~is_schedule(c["schedule"][some.rows], PAIRED)
        layers = self._layers(some.rows[plain], composition) if plain.any() else None
        if layers is not None:
            simulated = self.bounds.simulated(some.rows, layers, hides="pairs")
            better = np.where(plain, np.maximum(better, simulated), better)
        self._push_pipelines(replace(some, bounds=better))

    def _push_pipelines(self, some: _Some) -> None:
        for places in self._alike(some.rows, ("vpp", "schedule", "recompute")):
            sharded = self.space.columns["zero"][some.rows[places]] == SHARDED
            for half in (places[~sharded], places[sharded]):
                if len(half):
                    self._push(self._pipeline, some.part(half))

    def _pipeline(self, some: _Some) -> None:
        """Follow the critical path of the pipeline."""
        row = int(some.rows[0])
        try:
            path = self._paths.path(self.step(row, some.composition), self.bounds.prices(row))
        except (LayoutError, StrategyError):
            self.counts["schedule or strategies refuse"] += len(some.rows)
            return
        better = np.maximum(some.bounds, self.bounds.along(some.rows, path))
        for place in range(len(some.rows)):
            self._push(self._engine, some.part(np.array([place]), better))

    def _engine(self, some: _Some) -> None:
        """Simulate the step if it fits, and nothing that takes equally long has been."""
        row, bound = int(some.rows[0]), float(some.bounds[0])
        twin = (*self._values(row, _ALL), some.strategies)
        if twin in self._done:
            self.counts["as fast with less sharding"] += 1
            return
        inputs = self.step(row, some.composition)
        try:
            if not self._fit(row, inputs):
                self.counts["does not fit into memory"] += 1
                return
            seconds = step_seconds(inputs, self.bounds.prices(row), self._paths.schedule(inputs))
        except (LayoutError, StrategyError):
            self.counts["schedule or strategies refuse"] += 1
            return
        self._done.add(twin)
        self.ran.append(Ran(row, some.composition, bound, seconds))
        plan = self._values(row, PLAN)
        self._best[plan] = min(seconds, self._best.get(plan, seconds))
        if not some.strategies:
            self._serial = min(self._serial, seconds)
        best = heapq.nsmallest(self.top, self._best.values())
        self._limit = best[-1] if len(best) == self.top else self._limit
        if len(self.ran) % 50 == 0:
            self.say(f"{len(self.ran)} run, best {best[0]:.4g} s")

    # Inside

    def _push(self, stage: Stage, some: _Some) -> None:
        bound = float(some.bounds.min())
        if self._wanted(bound, some):
            heapq.heappush(self._queue, (bound, next(self._number), stage, some))

    def _wanted(self, bound: float, some: _Some) -> bool:
        """Whether a bound leaves room for a plan among the best, or for the best without strategies."""
        if self.overlap[0] and not some.strategies and bound < self._serial:
            return True
        return bound < self._limit and bound < self._best.get(self._values(int(some.rows[0]), PLAN), float("inf"))

    def _variants(self, row: int) -> Iterator[bool]:
        """Without and with strategies, where there is a pair for them."""
        if self.overlap[0]:
            yield False
        if self.overlap[1] and self.space.columns["tp"][row] > 1:
            yield True

    def _values(self, row: int, names: tuple[str, ...]) -> tuple[int, ...]:
        # Gradients that are sharded take as long as the optimizer's shards alone: ZeRO 2 is 1 with less memory.
        values = (int(self.space.columns[name][row]) for name in names)
        return tuple(1 if name == "zero" and value == 2 else value for name, value in zip(names, values, strict=True))

    def _alike(self, rows: Rows, names: tuple[str, ...]) -> Iterator[Rows]:
        """Places of rows that agree in some columns."""
        code = np.zeros(len(rows), dtype=np.int64)
        for name in names:
            values = self.space.columns[name][rows]
            code = code * (int(values.max(initial=0)) + 1) + values
        order = np.argsort(code, kind="stable")
        yield from np.split(order, np.flatnonzero(np.diff(code[order])) + 1)

    def _composition(self, some: _Some) -> Composition | None:
        row = int(some.rows[0])
        prices = self.bounds.prices(row)
        key = (*self._values(row, (*FAMILY, "recompute")), prices.groups.get("tp"))
        if key not in self._compositions:
            pairs = self.chooser.pairs(self.step(row, NO_STRATEGY), prices, PAIR_GROUPS)
            self._compositions[key] = Composition(pairs=pairs)
        found = self._compositions[key]
        return found if found.pairs else None

    def _layers(self, rows: Rows, composition: Composition) -> list[dict[Which, float]] | None:
        """Seconds of each kind of layer by pass, in the engine, for passes that the rows' schedules have.

        None where the first row refuses the strategies: another one may still take them.
        """
        row = int(rows[0])
        split = is_schedule(self.space.columns["schedule"][rows], SPLIT)
        passes = {"forward", *(_WHOLE if not split.all() else ()), *(_HALVES if split.any() else ())}
        try:
            inputs = self.step(row, composition)
            pieces = StagePieces(inputs, self.bounds.prices(row), self._paths.schedule(inputs))
            return [
                {which: pieces.layer(kind, which).duration_s if which in passes else 0.0 for which in _PASSES}
                for kind in self.space.model.kinds
            ]
        except (LayoutError, StrategyError):
            return None

    def _fit(self, row: int, inputs: StepInputs) -> bool:
        key = self._values(row, _MEMORY)
        key = (*key, int(self.space.columns["zero"][row]))
        if key not in self._fits:
            memory = step_memory(inputs, self._paths.schedule(inputs))
            self._fits[key] = max(entry.total_bytes for entry in memory) <= self.limit_bytes
        return self._fits[key]
