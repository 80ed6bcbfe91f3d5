"""Prices of a layout on a machine: its groups placed on nodes, and the clock of a long run."""

from __future__ import annotations

from collections.abc import Sequence

from overlapsim.cost.group_collective import GroupPlace, group_places
from overlapsim.cost.prices import PriceBook
from overlapsim.hardware.levels import levels
from overlapsim.hardware.nic_sharing import Rings
from overlapsim.hardware.profile import Cluster
from overlapsim.workload.layout import Layout
from overlapsim.workload.placement import placements
from overlapsim.workload.rank_map import ORDER, RankMap


def machine_prices(
    cluster: Cluster,
    layout: Layout,
    *,
    rank_order: Sequence[str] = ORDER,
    rings: Rings = "mirrored",
    sustained_clock: float = 1.0,
    models: dict[object, object] | None = None,
) -> PriceBook:
    """Prices of a cluster with a layout's groups placed on it.

    Beside the layout's groups there are ``pair`` (neighbours of a pipeline in one node) and ``world`` (all ranks).

    Parameters
    ----------
    cluster, layout : machine, and what is placed on it
    rank_order, rings : see `step.inputs.StepInputs`
    sustained_clock : clock of a long run over that of a short benchmark
    models : results of cost models, shared between calls on one cluster

    Raises
    ------
    LayoutError
        If the layout has more ranks than the machine.
    """
    models = {} if models is None else models
    placed = placements(RankMap(layout, tuple(rank_order)), levels(cluster), cluster.node.num_devices)
    groups = dict(group_places(cluster, placed, rings=rings, models=models))
    groups["pair"] = GroupPlace(2)
    node = cluster.node
    nodes = -(-layout.world_size // node.num_devices)
    groups["world"] = GroupPlace(layout.world_size, nodes, node.num_nics * node.nic_bandwidth_bytes_per_s)
    prices = PriceBook(cluster, layout.world_size, groups=groups, models=models)
    if sustained_clock < 1:
        prices = prices.scaled("gemm", 1 / sustained_clock).scaled("attention", 1 / sustained_clock)
    return prices
