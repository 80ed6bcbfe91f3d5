"""Questions that the suite of strategies asks: layers, plain pairs, experts with their tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from overlapsim.cost.prices import PriceBook
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.profile import Cluster
from overlapsim.strategy.base import Context, Strategy
from overlapsim.strategy.chains import Relation
from overlapsim.strategy.compose import ArrangingStrategy
from overlapsim.testing.expert_layers import expert_layers
from overlapsim.testing.layers import training_layers
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.operators import (
    CollectiveKind,
    CollectiveOp,
    GemmOp,
    GroupedGemmOp,
    KernelOp,
    Operator,
    OperatorGraph,
    gemm_and_collective,
    independent_pair,
)

MACHINES: Final = ("a800-sxm8", "h100-sxm8", "rtx4090-pcie8")
# Large, skinny, ragged and small; the last is under one wave of every GPU's tiles.
SHAPES: Final = ((8192, 8192, 4096), (2048, 3584, 8192), (5000, 3000, 1700), (64, 1024, 512))
# Rows of each expert, columns and depth: one expert, idle and unequal ones, many small ones, under one wave.
EXPERTS: Final = (
    ((2048,), 4096, 3584),
    ((900, 0, 1300, 77), 3000, 1704),
    ((96,) * 16, 2048, 1024),
    ((50, 14), 256, 512),
)
KINDS: Final[dict[Relation, tuple[CollectiveKind, ...]]] = {
    "after": ("all_reduce", "reduce_scatter", "all_to_all"),
    "before": ("all_gather", "all_to_all"),
    "independent": ("all_gather", "reduce_scatter"),
}
EXPERT_KINDS: Final[dict[Relation, tuple[CollectiveKind, ...]]] = {
    "after": ("reduce_scatter", "all_to_all"),
    "before": ("all_gather", "all_to_all"),
}
RANKS: Final = 4


@dataclass(frozen=True)
class Case:
    """One question: a name for reports, and the context."""

    name: str
    context: Context

    def __repr__(self) -> str:
        return self.name


@lru_cache(maxsize=16)
def _cluster(name: str) -> Cluster:
    return load_cluster(name)


def cases(strategy: Strategy) -> Iterator[Case]:
    """Yield the questions for a strategy: layers for one that arranges graphs, pairs in its relations for others."""
    if isinstance(strategy, ArrangingStrategy):
        for machine in MACHINES[:2]:
            prices = PriceBook(_cluster(machine), RANKS)
            yield Case(f"{machine}-layers", Context(training_layers(), prices))
            for name, graph in expert_layers(RANKS).items():
                yield Case(f"{machine}-experts-{name}", Context(graph, prices))
        return
    if strategy.experts:
        for machine, (rows, n, k), relation in itertools.product(MACHINES, EXPERTS, strategy.relations):
            for kind in EXPERT_KINDS[relation]:
                graph = experts_graph(rows, n, k, kind, relation)
                name = f"{machine}-{kind}-{relation}-{len(rows)}experts-{sum(rows)}x{n}x{k}"
                yield Case(name, Context(graph, PriceBook(_cluster(machine), RANKS)))
        return
    for machine, (m, n, k), relation in itertools.product(MACHINES, SHAPES, strategy.relations):
        for kind in KINDS[relation]:
            gemm = GemmOp(m, n, k)
            prices = PriceBook(_cluster(machine), RANKS, gemm=gemm, kind=kind)
            yield Case(f"{machine}-{kind}-{relation}-{m}x{n}x{k}", Context(pair_graph(gemm, kind, relation), prices))


def pair_graph(gemm: GemmOp, kind: CollectiveKind, relation: Relation) -> OperatorGraph:
    """A GEMM and a collective in one of the relations: of C behind it, of A in front."""
    if relation == "independent":
        return independent_pair(gemm, kind, RANKS, float(gemm.output_bytes))
    if relation == "before" and kind == "all_to_all":
        exchange = CollectiveOp(kind, float(2 * gemm.m * gemm.k), RANKS, gemm.dtype, gemm.name, gemm.pass_)
        return OperatorGraph((exchange, gemm), ((0, 1),))
    return gemm_and_collective(gemm, kind, RANKS)


def experts_graph(
    rows: tuple[int, ...], n: int, k: int, kind: CollectiveKind, relation: Relation, ranks: int = RANKS
) -> OperatorGraph:
    """Experts with the collective of their tokens, and the kernel that orders or adds them where it runs.

    Examples
    --------
    >>> [op.name for op in experts_graph((64,), 256, 128, "all_to_all", "before").operators]
    ['moe.permute', 'moe.dispatch', 'moe.fc1']
    """
    before, count = relation == "before", sum(rows)
    width = k if before else n
    experts = KernelOp(GroupedGemmOp(rows, n, k), "moe.fc1" if before else "moe.fc2")
    name = "moe.dispatch" if before else "moe.combine"
    collective = CollectiveOp(kind, float(2 * count * width), ranks, name=name, group="ep")
    moves = KernelOp(
        MemoryOp("moe_permute" if before else "moe_unpermute", count, width),
        "moe.permute" if before else "moe.unpermute",
    )
    order: tuple[Operator, ...]
    if kind == "all_to_all":
        order = (moves, collective, experts) if before else (experts, collective, moves)
    else:
        order = (collective, moves, experts) if before else (experts, moves, collective)
    return OperatorGraph(order, ((0, 1), (1, 2)))
