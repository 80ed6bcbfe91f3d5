"""Clusters that differ from a bundled one in a few fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from overlapsim.hardware.profile import Cluster


def with_node(cluster: Cluster, **changes: Any) -> Cluster:
    """The cluster with some fields of its node replaced."""
    return replace(cluster, node=replace(cluster.node, **changes))


def with_device(cluster: Cluster, **changes: Any) -> Cluster:
    """The cluster with some fields of its device replaced."""
    return with_node(cluster, device=replace(cluster.device, **changes))
