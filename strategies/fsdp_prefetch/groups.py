"""Which parameters are gathered together, when they are first and last used, and which gathers are not repeated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from overlapsim.errors import StrategyError
from overlapsim.strategy.arrange import collectives, consumers, layers
from overlapsim.workload.operators import OperatorGraph

FORWARD: Final = "fwd"
"""Pass of the gathers before a forward; all others are of a backward, recomputation included."""


@dataclass
class Group:
    """Parameters gathered at once.

    Attributes
    ----------
    members : positions of the gathers that become one
    uses : positions of the operators that need them in the pass for which they were gathered, rising
    later_uses : those of the backward for which they were kept
    spared : for a member, the later gather of the same parameters that is not made because they were kept
    """

    members: list[int]
    uses: list[int]
    later_uses: list[int] = field(default_factory=list)
    spared: dict[int, int] = field(default_factory=dict)

    @property
    def last_use(self) -> int:
        """The last operator that needs them at all."""
        return max((*self.uses, *self.later_uses))


def gathers(graph: OperatorGraph) -> list[int]:
    """Positions of the gathers of parameters."""
    return collectives(graph, "param.", ("all_gather",))


def scatters(graph: OperatorGraph) -> list[int]:
    """Positions of the gradients scattered to their shards."""
    return collectives(graph, "grad.", ("reduce_scatter",))


def gather_groups(graph: OperatorGraph, layers_per_group: int, *, reshard: bool, keep_last: bool) -> list[Group]:
    """Cut the gathers of a step into groups, in order; kept parameters are not gathered for the backward.

    A backward runs the layers in reverse, so what was kept last is wanted first.

    Parameters
    ----------
    graph : whole step
    layers_per_group : layers gathered together; a group never crosses from one pass to another
    reshard : False keeps all parameters from the forward to the backward
    keep_last : keep those of the last group before a backward begins

    Raises
    ------
    StrategyError
        If parameters are gathered and nothing uses them.
    """
    used = consumers(graph)
    groups: list[Group] = []
    kept: dict[str, list[tuple[Group, int]]] = {}
    for positions in by_layers(graph, gathers(graph), layers_per_group):
        forward = graph.operators[positions[0]].pass_ == FORWARD
        if forward and reshard:
            kept = {}
        own = []
        for i in positions:
            stack = kept.get(graph.operators[i].name, [])
            if forward or not stack:
                own.append(i)
                continue
            group, member = stack.pop()
            group.spared[member] = i
            group.later_uses = sorted((*group.later_uses, *_uses(graph, used, i)))
        if not forward and reshard:
            kept = {}
        if not own:
            continue
        groups.append(Group(own, sorted(p for i in own for p in _uses(graph, used, i))))
        if forward and (keep_last or not reshard):
            for i in own:
                kept.setdefault(graph.operators[i].name, []).append((groups[-1], i))
    return groups


def by_layers(graph: OperatorGraph, positions: Sequence[int], count: int) -> Iterator[list[int]]:
    """Yield the collectives of `count` layers of one pass at a time."""
    group: list[list[int]] = []
    for layer in layers(graph, positions):
        turn = bool(group) and graph.operators[layer[0]].pass_ != graph.operators[group[0][0]].pass_
        if group and (len(group) == count or turn):
            yield [i for one in group for i in one]
            group = []
        group.append(layer)
    if group:
        yield [i for one in group for i in one]


def _uses(graph: OperatorGraph, used: Mapping[int, Sequence[int]], position: int) -> Sequence[int]:
    found = used.get(position)
    if not found:
        op = graph.operators[position]
        raise StrategyError(f"{op.name} {op.pass_} is gathered and no operator depends on it; give it its consumer")
    return found
