"""Fully sharded data parallelism: parameters gathered a bounded number of groups ahead, gradients scattered behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from msgspec import Meta
from overlapsim.strategies.fsdp_prefetch.groups import FORWARD, Group, by_layers, gather_groups, gathers, scatters

from overlapsim.plan import Finding
from overlapsim.strategy.arrange import Slot, alike, assemble, layers, merged, slots_of
from overlapsim.strategy.base import YES, Applicability, Context, Parameters, ParameterSpace, StrategyInfo
from overlapsim.strategy.compose import ArrangingStrategy
from overlapsim.workload.operators import COMPUTE, CollectiveOp, OperatorGraph

GATHER_STREAM: Final = "fsdp_gather"
SCATTER_STREAM: Final = "fsdp_scatter"
"""Gathers must not queue behind scatters: each has a stream (and a communicator) of its own."""
DEPTHS: Final = (2, 3, 4)


@dataclass(frozen=True)
class FsdpPrefetchParameters:
    """How parameters are grouped, how far they are gathered ahead, and when they are dropped.

    Attributes
    ----------
    layers_per_group : layers whose parameters are gathered together
    depth : groups that may be there at once, the one in use included; 1 gathers nothing ahead, 2 is the usual
        prefetch of the next group
    rate_limit : whether the bound of `depth` is held; without it gathers run as far ahead as the link allows
    reshard_after_forward : whether parameters are dropped after the forward and gathered again for the backward
    keep_last : whether the last group of the forward is kept for the backward that begins with it
    """

    layers_per_group: Annotated[int, Meta(ge=1, le=4096)]
    depth: Annotated[int, Meta(ge=1, le=4096)]
    rate_limit: bool
    reshard_after_forward: bool
    keep_last: bool


class FsdpPrefetch(ArrangingStrategy):
    """Gather group i + 1 under the compute of group i; free group i before group i + depth is gathered."""

    name = "fsdp_prefetch"
    parameter_type = FsdpPrefetchParameters
    traits = frozenset({"sharded_parameters"})
    needs = ("data_parallel", "many_queues")
    excludes = frozenset({"data_parallel"})
    info = StrategyInfo(
        summary="sharded parameters gathered ahead of use, gradients reduced and scattered behind the backward",
        granularity="group of layers",
        hides="parameter gathers under the group before, gradient scatters under the backward of the next",
        cost="SMs of two collectives most of the time, memory of `depth` whole groups; first gather and last scatter "
        "are exposed, and gathers repeat every micro-batch",
        frameworks=(
            "PyTorch fully_shard (prefetch lists, reshard_after_forward)",
            "Megatron-FSDP (suggested-communication-unit-size, fsdp-double-buffer)",
            "DeepSpeed ZeRO-3 (stage3_prefetch_bucket_size, stage3_max_live_parameters)",
        ),
        references=("Rajbhandari et al., SC'20 (ZeRO)", "Zhao et al., VLDB'23 (PyTorch FSDP)"),
    )

    def applies_to(self, context: Context) -> Applicability:
        """Refuse a graph whose parameters are not sharded, or whose gradients are not scattered back."""
        graph = context.graph
        if all(graph.operators[i].pass_ == FORWARD for i in gathers(graph)):
            reason = "parameters are not sharded: the graph has no all_gather named param.* in its backward"
            return Applicability(False, (reason,))
        return YES

    def parameters(self, context: Context) -> ParameterSpace:
        """Leave open how far ahead to gather and how much at once."""
        graph = context.graph
        count = len(list(layers(graph, [i for i in gathers(graph) if graph.operators[i].pass_ == FORWARD])))
        grid: dict[str, tuple[Any, ...]] = {
            "layers_per_group": tuple(n for n in (1, 2, 4) if n <= max(1, count)),
            "depth": DEPTHS,
            "rate_limit": (True,),
            "reshard_after_forward": (True,),
            "keep_last": (True,),
        }
        return ParameterSpace(grid)

    def degenerate(self, context: Context) -> Parameters:
        """Nothing ahead, nothing kept."""
        return {
            "layers_per_group": 1,
            "depth": 1,
            "rate_limit": True,
            "reshard_after_forward": True,
            "keep_last": False,
        }

    def extra_memory_bytes(self, context: Context, parameters: Parameters) -> float:
        """Whole parameters that are there at once, beyond the one group that serial execution holds."""
        groups = self._groups(context.graph, parameters)
        sizes = [sum(_size(context.graph, i) for i in group.members) for group in groups]
        depth = len(sizes) if not parameters["rate_limit"] else parameters["depth"]
        if not parameters["reshard_after_forward"]:
            return sum(sizes) - max(sizes)
        held: float = max(sum(sizes[i : i + depth]) for i in range(len(sizes)))
        return held - max(sizes)

    def arrange(self, context: Context, parameters: Parameters) -> OperatorGraph:
        """Merge each group's gathers, issue them ahead, and let each wait until an earlier group is freed."""
        graph, depth = context.graph, parameters["depth"]
        groups = self._groups(graph, parameters)
        scattered = scatters(graph)
        taken = {*gathers(graph), *scattered}
        by_position = {slot.stands_for[0]: slot for slot in slots_of(graph)}
        slots = [slot for i, slot in by_position.items() if i not in taken]
        for number, group in enumerate(groups):
            freed = groups[number - depth] if number >= depth else None
            for slot in self._gather(graph, groups, number, depth):
                if freed is not None and depth > 1 and parameters["rate_limit"]:
                    # What is kept for the backward cannot be waited for in the forward.
                    last = freed.last_use if parameters["reshard_after_forward"] else freed.uses[-1]
                    slot.after.append(by_position[last])
                by_position[group.last_use].frees_bytes += slot.allocates_bytes
                slots.append(slot)
        slots += self._scatter(graph, scattered, parameters, by_position)
        return assemble(graph, slots)

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return groups and bounds."""
        first = context.graph.operators[gathers(context.graph)[0]]
        assert isinstance(first, CollectiveOp)
        return {
            "ranks": first.ranks,
            "layers_per_group": parameters["layers_per_group"],
            "groups_prefetched": parameters["depth"] - 1,
            "limit_gathers": parameters["rate_limit"],
            "reshard_after_forward": parameters["reshard_after_forward"],
            "keep_last_group": parameters["keep_last"],
            "num_gathers": len(self._groups(context.graph, parameters)),
        }

    def findings(self, context: Context, parameters: Parameters) -> tuple[Finding, ...]:
        """Say where memory is not bounded."""
        if parameters["rate_limit"] and parameters["reshard_after_forward"]:
            return ()
        message = (
            "gathered parameters are not bounded: without a rate limit, or without dropping them after the forward, "
            "all groups may be there at once"
        )
        return (Finding("parameters_unbounded", message),)

    def _groups(self, graph: OperatorGraph, parameters: Parameters) -> list[Group]:
        return gather_groups(
            graph,
            parameters["layers_per_group"],
            reshard=parameters["reshard_after_forward"],
            keep_last=parameters["keep_last"],
        )

    def _gather(self, graph: OperatorGraph, groups: Sequence[Group], number: int, depth: int) -> Iterator[Slot]:
        """Collectives of one group, issued right before the group `depth - 1` before it is computed."""
        group = groups[number]
        early = groups[max(0, number - depth + 1)]
        turned = early.later_uses and graph.operators[group.members[0]].pass_ != FORWARD
        first_use = (early.later_uses if turned else early.uses)[0]
        stream = GATHER_STREAM if depth > 1 else COMPUTE
        for members in alike(graph, group.members):
            at = min(first_use - 0.5, members[0]) if number else members[0]
            slot = merged(graph, members, "param.group", at, stream)
            slot.stands_for = (*members, *(group.spared[i] for i in members if i in group.spared))
            slot.allocates_bytes = sum(_size(graph, i) for i in members)
            yield slot

    def _scatter(
        self, graph: OperatorGraph, positions: Sequence[int], parameters: Parameters, by_position: Mapping[int, Slot]
    ) -> Iterator[Slot]:
        """Gradients of each group, behind the last of them; they are whole from their computation to their scatter."""
        stream = SCATTER_STREAM if parameters["depth"] > 1 else COMPUTE
        for group in by_layers(graph, positions, parameters["layers_per_group"]):
            for members in alike(graph, group):
                slot = merged(graph, members, "grad.group", members[-1], stream)
                for i in members:
                    producers = graph.producers(i)
                    if producers:
                        by_position[producers[0]].allocates_bytes += _size(graph, i)
                        slot.frees_bytes += _size(graph, i)
                yield slot


def _size(graph: OperatorGraph, position: int) -> float:
    op = graph.operators[position]
    assert isinstance(op, CollectiveOp)
    return op.size_bytes


STRATEGY = FsdpPrefetch()
