"""Where a step's parameters are synchronised in two levels: within a node, where it holds copies, and between nodes.

MegaScale-MoE (arXiv 2505.11432, appendix A.1): Ulysses' ranks hold attention's weights in copies. Their gradients are
scattered within the node and then between nodes, parameters gathered between nodes and then within; in chunks, so that
the links of a node work beside its NICs. What goes between nodes is what tensor parallelism would send there.
"""

from __future__ import annotations

from typing import Final

from overlapsim.step.inputs import StepInputs
from overlapsim.workload.rank_map import GroupKind, RankMap

INNER: Final[GroupKind] = "sp"
"""Group of the copies within a node."""
OUTER: Final[GroupKind] = "dp"
"""Group of the ranks that hold the same shard of them on different nodes."""


def two_levels(inputs: StepInputs) -> bool:
    """Whether dense parameters are synchronised so: sharded once a step, copies within nodes and ranks beyond them."""
    layout = inputs.layout
    if inputs.dp_sync != "hierarchical" or not layout.zero or inputs.sharded or layout.hsdp > 1 or layout.cp > 1:
        return False
    return layout.sp > 1 and layout.dp > 1 and _within(inputs, INNER) and not _within(inputs, OUTER)


def _within(inputs: StepInputs, kind: GroupKind) -> bool:
    """Whether every group of a kind lies within one node."""
    per_node = inputs.cluster.node.num_devices
    return all(per_node % (stride * size) == 0 for stride, size in RankMap(inputs.layout, inputs.rank_order).axes(kind))
