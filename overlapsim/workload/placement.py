"""Where a layout's groups lie on a machine: one representative each, by arithmetic on strides, whatever the scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Protocol

from overlapsim.errors import LayoutError
from overlapsim.workload.rank_map import GROUP_KINDS, Axis, GroupKind, RankMap


class LevelSize(Protocol):
    """What is asked of a level of a machine (`overlapsim.hardware.levels.Level` has it)."""

    @property
    def name(self) -> str:
        """Name such as ``nvlink`` or ``rail``."""

    @property
    def ranks(self) -> int:
        """GPUs of one group at this level."""


@dataclass(frozen=True)
class Placement:
    """One group that stands for all of its kind.

    Attributes
    ----------
    kind, size, count : kind of group, ranks of one, and how many there are
    ranks : of the representative: a group that crosses as many levels as any of its kind does
    level : innermost level that holds every group of the kind whole; empty for groups of one rank
    nodes : nodes that the representative spans
    node_ranks : most of its ranks that one node holds
    node_members : numbers within that node of the members that each group leaving the node has there: the groups
        share the node's NICs. Empty if the groups stay within nodes
    """

    kind: GroupKind
    size: int
    count: int
    ranks: tuple[int, ...]
    level: str
    nodes: int
    node_ranks: int
    node_members: tuple[tuple[int, ...], ...]

    @property
    def node_groups(self) -> int:
        """Groups that share a node's NICs."""
        return len(self.node_members)


def placements(ranks: RankMap, levels: Sequence[LevelSize], ranks_per_node: int) -> dict[GroupKind, Placement]:
    """Placement of every kind of group, rank i on device i (nodes are filled one after another).

    Parameters
    ----------
    levels : sequence
        Levels of the machine, innermost first, the last one the whole (`overlapsim.hardware.levels.levels`).
    ranks_per_node : int
        GPUs of a node.

    Raises
    ------
    LayoutError
        If the layout has more ranks than the machine.

    Examples
    --------
    >>> from overlapsim.workload.layout import Layout
    >>> from overlapsim.hardware.levels import levels
    >>> from overlapsim.hardware.loading import load_cluster
    >>> cluster = load_cluster("h100-sxm8").with_nodes(1536)
    >>> found = placements(RankMap(Layout(tp=8, pp=8, dp=192)), levels(cluster), 8)
    >>> found["tp"].level, found["dp"].level, found["dp"].node_groups, found["pp"].ranks[1]
    ('nvlink', 'spine', 8, 1536)
    """
    whole = max((level.ranks for level in levels), default=1)
    if ranks.layout.world_size > whole:
        raise LayoutError(
            f"{ranks.layout} has {ranks.layout.world_size} ranks and the machine {whole} GPUs; "
            "expected a smaller layout, or more nodes"
        )
    return {kind: _place(ranks, kind, levels, ranks_per_node) for kind in GROUP_KINDS}


def _place(ranks: RankMap, kind: GroupKind, levels: Sequence[LevelSize], ranks_per_node: int) -> Placement:
    extent = sum(stride * (size - 1) for stride, size in ranks.axes(kind))
    base, level = 0, ""
    for inner in levels if extent else ():
        first = _crossing(ranks.others(kind), extent, inner.ranks)
        level = inner.name
        if first is None:
            break
        base = first
    members = ranks.group(kind, base)
    in_nodes = Counter(rank // ranks_per_node for rank in members)
    number, most = max(in_nodes.items(), key=lambda item: item[1])
    return Placement(
        kind,
        len(members),
        ranks.count(kind),
        members,
        level,
        len(in_nodes),
        most,
        _leaving(ranks, kind, extent, number * ranks_per_node, ranks_per_node),
    )


def _crossing(others: Sequence[Axis], extent: int, block: int) -> int | None:
    """Lowest rank of a group that does not fit into one block of so many ranks: rank 0 if its group does not."""
    if extent >= block:
        return 0
    inside = [(stride, size) for stride, size in others if stride % block]
    if all(block % (stride * size) == 0 for stride, size in inside):
        # Blocks are whole multiples of these axes: the last group of a block begins last.
        last = sum(stride * (size - 1) for stride, size in inside)
        return last if last + extent >= block else None
    # Where within a block groups may begin: sums of the other axes' steps, each place once.
    begins = {0: 0}
    for stride, size in inside:
        cycle = block // gcd(stride, block)
        begins = {
            (place + step * stride) % block: first + step * stride
            for place, first in begins.items()
            for step in reversed(range(min(size, cycle)))
        }
    place = max(begins)
    return begins[place] if place + extent >= block else None


def _leaving(ranks: RankMap, kind: GroupKind, extent: int, first: int, count: int) -> tuple[tuple[int, ...], ...]:
    """Members within a node of each group that is not whole within it."""
    found: dict[int, list[int]] = {}
    for rank in range(first, min(first + count, ranks.layout.world_size)):
        base = ranks.base(kind, rank)
        if ranks.holds(kind, rank) and not first <= base <= base + extent < first + count:
            found.setdefault(base, []).append(rank - first)
    return tuple(map(tuple, found.values()))
