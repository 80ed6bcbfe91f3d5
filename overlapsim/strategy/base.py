"""The contract of a strategy: a rule that rewrites a piece of an operator graph into tasks that overlap."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from overlapsim.cost.prices import PriceBook
from overlapsim.errors import StrategyError
from overlapsim.plan import Cause, Finding
from overlapsim.strategy.chains import Relation as Relation
from overlapsim.strategy.chains import nearest_collective
from overlapsim.strategy.parameter_words import parameter_example, parameter_words
from overlapsim.strategy.tasks import Placement, Site
from overlapsim.workload.operators import CollectiveOp, GemmOp, OperatorGraph

Parameters = Mapping[str, Any]
Float = npt.NDArray[np.float64]
Scope = Literal["pair", "graph"]
Trait = Literal[
    "tensor_parallel",  # hides collectives of a tensor-parallel group
    "split_gemm",  # cuts a GEMM into launches, each with its share of the collective
    "bulk",  # a whole collective beside a whole GEMM that needs nothing of it
    "whole_gemm",  # one GEMM launch whose tiles or waves are sent as they are done
    "fused_experts",  # expert kernels that fetch and send their tokens themselves
    "two_batch",  # two micro-batches in turn, one computing while the other communicates
    "shared_expert",  # the experts that all tokens take beside dispatch and combine
    "expert_pair",  # forward of one micro-batch with the backward of another hides expert exchanges
    "bidirectional",  # micro-batches enter the pipeline from both ends
    "pipeline_p2p",  # activations between stages beside compute
    "wgrad_delay",  # weight gradients computed later than they could be
    "operator_order",  # operators of a layer issued in an order of its own
    "data_parallel",  # gradients reduced beside the backward
    "sharded_parameters",  # parameters gathered before use and dropped after it
]
Need = Literal[
    "tensor_parallel",
    "sequence_parallel",
    "data_parallel",
    "expert_parallel",
    "pipeline",
    "interleaved",
    "interleaved_if_pipelined",
    "two_stages_a_rank",
    "micro_batches_twice_the_stages",
    "weight_gradients",
    "no_full_recompute",
    "no_moe_recompute",
    "one_queue_before_blackwell",
    "many_queues",
    "direct_dispatch",
    "exchanged_tokens",
    "eager_stages",
]


@dataclass(frozen=True)
class Applicability:
    """Whether a strategy can be used here, and if not, why.

    Attributes
    ----------
    applies : bool
    reasons : sentences for people, empty when it applies
    cause : the machine-readable reason (``under_one_wave`` ...), ``none`` when it applies
    """

    applies: bool
    reasons: tuple[str, ...] = ()
    cause: Cause = "none"


YES: Final = Applicability(True)


@dataclass(frozen=True)
class Pair:
    """One GEMM and one collective.

    Attributes
    ----------
    relation : where the collective stands
    gemm_at, collective_at : their positions in the graph
    """

    gemm: GemmOp
    collective: CollectiveOp
    relation: Relation
    gemm_at: int
    collective_at: int

    def placement(
        self, gemm: tuple[tuple[int, ...], tuple[int, ...]], collective: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> Placement:
        """Placement from (entries, exits) of both."""
        return Placement(
            {self.gemm_at: gemm[0], self.collective_at: collective[0]},
            {self.gemm_at: gemm[1], self.collective_at: collective[1]},
        )


@dataclass(frozen=True)
class Context:
    """What a strategy is asked about: operators, and the prices on the machine at hand.

    Attributes
    ----------
    graph, prices : operators and what they cost
    pairs : what else is chosen, by operator name and pass: strategies (`compose.Chosen`) that will take single GEMMs
        with their collectives; for those that arrange the graph around them
    seconds_of : runs a context's graph as it is issued, pairs by their strategies; None where nobody can
    """

    graph: OperatorGraph
    prices: PriceBook
    pairs: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    seconds_of: Callable[[Context], float] | None = None

    def pair(self) -> Pair:
        """Return the GEMM and the collective of a graph that holds just these two.

        Raises
        ------
        StrategyError
            If the graph is anything else.
        """
        match self.graph.operators:
            case (GemmOp() as gemm, CollectiveOp() as collective):
                return Pair(gemm, collective, "after" if self.graph.dependencies else "independent", 0, 1)
            case (CollectiveOp() as collective, GemmOp() as gemm):
                return Pair(gemm, collective, "before" if self.graph.dependencies else "independent", 1, 0)
        raise StrategyError(
            f"the graph has {len(self.graph.operators)} operators; this strategy takes one GEMM and one collective"
        )


_PLACES: Final = {
    "after": "a collective on the GEMM's output",
    "before": "an all_gather of the GEMM's rows",
    "independent": "a collective that is independent of the GEMM (a bulk pair)",
}


def refuse_relation(pair: Pair, takes: Sequence[Relation]) -> Applicability | None:
    """Refusal of a pair that stands in another relation than those a strategy takes; None where it does."""
    if pair.relation in takes:
        return None
    wanted = " or ".join(_PLACES[relation] for relation in takes)
    return Applicability(False, (f"this is {_PLACES[pair.relation]}; the strategy takes {wanted}",))


@dataclass(frozen=True)
class Partition:
    """A split of consecutive waves into groups, to be solved exactly (``planner/partition.py``).

    With groups cut after waves ``0 = w0 < w1 < ... = T``, the communication of
    the waves up to w is finished at
    ``C[w] = min over v < w of max(A[w], C[v]) + tau(v, w)``.

    Attributes
    ----------
    wave_end_s : shape (T,), A[w] for w = 1 .. T: when wave w is computed while the collective has its SMs
    whole_s : when all waves are computed if there is one group (the kernel then has all SMs)
    tau_s : shape (T, T): ``tau_s[v, w - 1]`` is the time to communicate waves v .. w - 1, cost per group included
    to_parameters : turns rising cuts (w1, .., T) into the strategy's parameters
    """

    wave_end_s: Float
    whole_s: float
    tau_s: Float
    to_parameters: Callable[[tuple[int, ...]], Parameters]


@dataclass(frozen=True)
class ParameterSpace:
    """What a strategy leaves open.

    Attributes
    ----------
    grid : values per parameter, tried in every combination; defaults first
    partitions : for one grid point, the wave partitions to solve, none where there is nothing to split.  Several state
        the same split under different beliefs about what the recurrence cannot hold; the engine decides between them
    screen : closed form by which grid points are ordered before the best of them are run; None keeps the grid's order
    """

    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    partitions: Callable[[Parameters], tuple[Partition, ...]] | None = None
    screen: Callable[[Parameters], float] | None = None

    def points(self) -> Iterator[dict[str, Any]]:
        """Yield every combination of the grid, in order; one empty point for an empty grid."""
        for values in itertools.product(*self.grid.values()):
            yield dict(zip(self.grid, values, strict=True))


@dataclass(frozen=True)
class NoParameters:
    """Parameters of a strategy that leaves nothing open."""


@dataclass(frozen=True)
class StrategyInfo:
    """What `overlapsim strategies show` prints.

    Attributes
    ----------
    summary : one line
    granularity : op, chunk, wave group, tile ...
    hides : what runs under what
    cost : what it takes (SMs, memory, extra launches)
    frameworks : where it can be switched on
    references : papers and repositories
    takes : the operators that it is for, where its relations do not say it
    """

    summary: str
    granularity: str
    hides: str
    cost: str
    frameworks: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    takes: str = ""


class Strategy(ABC):
    """A rule that rewrites part of an operator graph into tasks that overlap.

    A new strategy is a new folder in ``strategies/`` or a package with an
    entry point in the group ``overlapsim.strategies``; nothing else changes.
    ``overlapsim.testing`` holds the suite that every strategy must pass.
    """

    name: ClassVar[str]
    info: ClassVar[StrategyInfo]
    overlaps: ClassVar[bool] = True
    """False for serial execution: the best of those is the baseline of every speed-up."""
    scope: ClassVar[Scope] = "pair"
    """What it takes: one GEMM and its collective, or a whole graph that it arranges (`compose.ArrangingStrategy`)."""
    relations: ClassVar[tuple[Relation, ...]] = ("after",)
    """Where the collective may stand in a pair that the strategy takes."""
    experts: ClassVar[bool] = False
    """True where the GEMM of its pairs is the grouped GEMM of experts."""
    own_kernel: ClassVar[bool] = False
    """True where the GEMM is a kernel of the strategy's own, with a time of its own (``--kernel-time``)."""
    traits: ClassVar[frozenset[Trait]] = frozenset()
    """What it is, for rules on what goes together (``strategy/compatibility.py``)."""
    needs: ClassVar[tuple[Need, ...]] = ()
    """What it needs of the run: each is a rule of ``strategy/compatibility.py``."""
    excludes: ClassVar[frozenset[Trait]] = frozenset()
    """What others must not be to be combined with it."""

    parameter_type: ClassVar[type]
    """A dataclass with one typed field per parameter: what plan files are checked against."""

    def check(self, parameters: Parameters) -> None:
        """Refuse parameters that are missing, unknown or of another type.

        Raises
        ------
        StrategyError
            Naming the parameter.
        """
        known = {item.name for item in fields(self.parameter_type)}
        if unknown := sorted(set(parameters) - known):
            raise StrategyError(
                f"{self.name} has no parameter {unknown[0]!r}; it takes {', '.join(sorted(known)) or 'none'}"
            )
        try:
            msgspec.convert(dict(parameters), self.parameter_type)
        except msgspec.ValidationError as error:
            takes = "; ".join(f"{name}: {word}" for name, word in parameter_words(self.parameter_type).items())
            example = parameter_example(self.parameter_type)
            such_as = f"{self.name}:{example}" if example else self.name
            raise StrategyError(
                f"parameters of {self.name} cannot be used: {error}; it takes {takes}; such as {such_as}"
            ) from None

    def piece(self, graph: OperatorGraph, gemm: int, taken: Collection[int] = ()) -> tuple[int, ...] | None:
        """Return the rising positions that it takes together with the GEMM at `gemm`, itself included.

        Unless overridden, the GEMM and the nearest free collective in one of its relations.

        Parameters
        ----------
        graph : a layer, or a stretch of layers
        gemm : position of a GEMM, of a grouped one for strategies of experts
        taken : positions that other strategies have

        Returns
        -------
        tuple of int, or None
            None where there is no such collective, or it is not free.
        """
        if self.experts or not isinstance(graph.operators[gemm], GemmOp):
            return None
        partner = nearest_collective(graph, gemm, self.relations, taken)
        return None if partner is None else tuple(sorted((gemm, partner)))

    @abstractmethod
    def applies_to(self, context: Context) -> Applicability:
        """Say whether the strategy can be used here, and if not, why."""

    @abstractmethod
    def parameters(self, context: Context) -> ParameterSpace:
        """Return what is left open; called only where the strategy applies."""

    @abstractmethod
    def rewrite(self, context: Context, parameters: Parameters, site: Site) -> Placement:
        """Add the tasks of the whole graph to `site`, priced by ``context.prices``.

        Returns
        -------
        Placement
            For every operator its first and last tasks, by which the rest of a larger graph waits and goes on.

        Raises
        ------
        StrategyError
            If a parameter is missing or cannot be used with this graph.
        """

    @abstractmethod
    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return what kernels and frameworks need, in neutral terms (units in the names, no framework's spelling)."""

    def degenerate(self, context: Context) -> Parameters | None:
        """Return parameters at which nothing overlaps: with the vendor's kernels and no latency they cost as serial.

        None where the strategy has no such point.
        """
        return None

    def hides(self, context: Context, parameters: Parameters) -> bool:
        """Say whether anything overlaps at these parameters: a gain without is another kernel's or transport's."""
        return self.overlaps

    def extra_memory_bytes(self, context: Context, parameters: Parameters) -> float:
        """Bytes that a rank holds beyond those of serial execution: buffers, copies, flags."""
        return 0.0

    def findings(self, context: Context, parameters: Parameters) -> tuple[Finding, ...]:
        """Return what was believed and not measured for this choice; none unless overridden."""
        return ()
