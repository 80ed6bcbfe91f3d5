"""Choice of a collective's algorithm in the objective asked for: time, or time and the SMs it takes from computing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from overlapsim.cost.algorithms import algorithms_for, checked_algorithm, wire_bytes
from overlapsim.cost.collective import CollectiveModel, num_nodes
from overlapsim.cost.copy_engine import copy_engine_seconds
from overlapsim.cost.fitted import fabric_model, latency_constants, one_node_model
from overlapsim.cost.structural import BRANCHES, PAIR_KINDS
from overlapsim.cost.tuner import FloatArray, TunerMachine, library_choice, num_steps
from overlapsim.errors import UsageError
from overlapsim.hardware.bounds import wire_lower_bound_s
from overlapsim.hardware.profile import Cluster
from overlapsim.hardware.topology import links
from overlapsim.workload.operators import CollectiveKind

Objective = Literal["time", "time_and_sms"]
OBJECTIVES: Final[tuple[Objective, ...]] = ("time", "time_and_sms")
# Latency of NVLS above the base: the tuner's own hop (SOURCES.md, NC), where no fit has it.
_NVLS_S: Final = 25e-6
# One-shot kernels of inference engines take 3.2 us on 8 H100 and 5 on 8 B200 for tiny messages, 0.6 of base + hop;
# their two-shot form starts at twice that (custom all-reduce tables beside AIC-COLL, hwprofiles/SOURCES.md).
_ONE_SHOT: Final = 0.6


@dataclass(frozen=True)
class Priced:
    """One algorithm's price.

    Attributes
    ----------
    algorithm : name in the catalogue
    seconds, sms : alone on the machine, and SMs held meanwhile
    objective_s : what is minimised, in seconds
    """

    algorithm: str
    seconds: float
    sms: int
    objective_s: float


@dataclass(frozen=True)
class Choice:
    """The best algorithm and the others.

    Attributes
    ----------
    best : least objective
    alternatives : all that can run, best first
    library : what the library's tuner would take by itself; empty where it does not choose
    """

    best: Priced
    alternatives: tuple[Priced, ...]
    library: str


def choose(
    cluster: Cluster,
    kind: CollectiveKind,
    size_bytes: float,
    ranks: int,
    objective: Objective = "time",
    *,
    forced: str | None = None,
    registered: bool = False,
    sms: int | None = None,
) -> Choice:
    """Cheapest algorithm for one collective.

    ``time`` minimises seconds. ``time_and_sms`` adds what the SMs held would have computed meanwhile, seconds times
    their share of the device: of two algorithms equally fast, the one that leaves more SMs to a GEMM beside it.

    Parameters
    ----------
    size_bytes, ranks : nccl-tests size, ranks on the first devices
    objective : one of `OBJECTIVES`
    forced : price this algorithm alone
    registered : user buffers are registered (fewer SMs for NVLS)
    sms : cap on the CTAs of every algorithm (``NCCL_MAX_CTAS``), which slows none here: a prior

    Raises
    ------
    UsageError
        If the objective or algorithm is unknown or cannot run.

    Examples
    --------
    >>> from overlapsim.hardware.loading import load_cluster
    >>> choose(load_cluster("h100-sxm8"), "all_reduce", 2.0**28, 8, "time_and_sms").best.algorithm
    'nvls'
    """
    if objective not in OBJECTIVES:
        raise UsageError(f"objective {objective!r} is unknown; expected one of {', '.join(OBJECTIVES)}")
    names = algorithms_for(cluster, kind, ranks) if forced is None else (checked_algorithm(forced, kind).name,)
    if not names:
        raise UsageError(f"no algorithm runs {kind} on {ranks} ranks of {cluster.name}")
    priced = []
    for name in names:
        seconds = float(algorithm_seconds(cluster, kind, ranks, name, np.array([size_bytes]))[0])
        held = checked_algorithm(name, kind).num_sms(cluster.device.architecture, registered=registered)
        held = min(held, cluster.device.num_sms if sms is None else sms)
        share = held / cluster.device.num_sms if objective == "time_and_sms" else 0.0
        priced.append(Priced(name, seconds, held, seconds * (1 + share)))
    priced.sort(key=lambda one: (one.objective_s, one.sms))
    return Choice(priced[0], tuple(priced), _library(cluster, kind, size_bytes, ranks))


def algorithm_seconds(
    cluster: Cluster, kind: CollectiveKind, ranks: int, algorithm: str, size_bytes: Sequence[float] | FloatArray
) -> FloatArray:
    """Times of one forced algorithm: fitted where the platform's fit holds it, else latency plus its busiest link.

    At one algorithm time never falls when bytes grow or links slow, and is never below bytes over wire rate.

    Raises
    ------
    UsageError
        If the algorithm is unknown, does not serve the kind, or cannot run on these ranks.
    """
    spec = checked_algorithm(algorithm, kind)
    sizes = np.asarray(size_bytes, dtype=np.float64)
    if ranks == 1:
        return np.zeros_like(sizes)
    if algorithm == "copy_engine":
        return copy_engine_seconds(cluster, kind, ranks, sizes)
    nodes = num_nodes(cluster, ranks)
    bound = wire_lower_bound_s(cluster, ranks, kind, _REFERENCE) / _REFERENCE
    fitted = _fitted(cluster, kind, ranks, nodes, algorithm, sizes)
    if fitted is not None:
        return np.asarray(np.maximum(fitted, sizes * max(bound, 0.0)))
    per_byte = _s_per_byte(cluster, wire_bytes(cluster, ranks, algorithm, kind, _REFERENCE), spec.efficiency)
    return np.asarray(_latency_s(cluster, kind, ranks, nodes, algorithm) + sizes * max(per_byte, bound))


_REFERENCE: Final = 2.0**30  # all loads are proportional to size
_NIC_EFFICIENCY: Final = 0.93


def _s_per_byte(cluster: Cluster, loads: Mapping[str, float], efficiency: float) -> float:
    """Seconds for each byte of size on the busiest link: NVLink at the algorithm's share, the way out at the NIC's."""
    reach = _NIC_EFFICIENCY if cluster.fabric is None else min(_NIC_EFFICIENCY, cluster.fabric.nic_efficiency)
    rates = links(cluster)
    times = (
        amount / (rates[link] * (efficiency if link.startswith("nvlink") else reach)) for link, amount in loads.items()
    )
    return max(times, default=0.0) / _REFERENCE


def _fitted(
    cluster: Cluster, kind: CollectiveKind, ranks: int, nodes: int, algorithm: str, sizes: FloatArray
) -> FloatArray | None:
    """Fitted price of a library algorithm inside a node; None where there is none."""
    model = one_node_model(cluster)
    if nodes > 1 or model is None or not model.prices(kind):
        return None
    if algorithm == "pairwise" and kind in PAIR_KINDS:
        return model.pair_seconds(kind, ranks, sizes)
    if algorithm == "nvls" and kind == "all_reduce":
        return model.branch_seconds(kind, ranks, sizes, "nvls")
    if algorithm == "ring":
        # A forced algorithm still picks its protocol; the fastest one is taken so that time never falls with size.
        prices = [model.branch_seconds(kind, ranks, sizes, branch) for branch in BRANCHES[:3]]
        return np.asarray(np.minimum.reduce(prices))
    return None


def _latency_s(cluster: Cluster, kind: CollectiveKind, ranks: int, nodes: int, algorithm: str) -> float:
    base, hop = latency_constants(cluster)
    net, depth, inside = cluster.net_latency_s, math.log2(nodes), ranks / nodes
    if nodes > 1:
        fabric, _ = fabric_model(cluster, ranks, nodes)
        net = fabric.parameters["tree_net"] + fabric.parameters["tree_net_simple"]
    steps = num_steps(kind, ranks)
    between = 0 if nodes == 1 else (2 if kind == "all_reduce" else 1) * (nodes - 1)
    match algorithm:
        case "ring":
            return base + (steps - between) * hop + between * net
        case "tree":
            return base + 2 * ((inside - 1) * hop + depth * net)
        case "nvls":
            return base + _NVLS_S
        case "nvls_tree":
            return base + _NVLS_S + 2 * depth * net
        case "collnet":
            return base + 2 * (inside - 1) * hop + 2 * net
        case "pat":
            return base + depth * net + 2.8e-6 * ranks
        case "one_shot":
            return _ONE_SHOT * (base + hop)
        case "two_shot":
            return 2 * _ONE_SHOT * (base + hop)
        case "two_level":
            return base + (inside - 1) * hop + 2 * net
        case _:
            return base + hop * min(ranks - 1, 8) / 2 + (net if nodes > 1 else 0.0)


def _library(cluster: Cluster, kind: CollectiveKind, size_bytes: float, ranks: int) -> str:
    if kind in PAIR_KINDS:
        return "pairwise"
    if num_nodes(cluster, ranks) == 1:
        return CollectiveModel(cluster, kind, ranks).algorithm(size_bytes)
    return multi_node_library_choice(cluster, kind, size_bytes, ranks)


def multi_node_library_choice(cluster: Cluster, kind: CollectiveKind, size_bytes: float, ranks: int) -> str:
    """Algorithm that the library's tuner picks across nodes, by its published constants."""
    node, nodes = cluster.node, num_nodes(cluster, ranks)
    if ranks % nodes:
        return "ring"
    machine = TunerMachine(
        cluster.device.architecture,
        "pci" if node.scale_up == "pcie" else "nvlink",
        node.nvlink_bandwidth_bytes_per_s or node.pcie_bandwidth_bytes_per_s,
        node.num_nics * node.nic_bandwidth_bytes_per_s,
        ranks,
        nodes,
        switch_reduction=node.switch_reduction,
    )
    pairs, index = library_choice(machine, kind, [size_bytes])
    return pairs[int(index[0])][0]
