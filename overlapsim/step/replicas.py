"""Which pipelines of a job are unlike each other: what is perturbed, by pipeline and device; the others once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from overlapsim.cost.group_collective import GroupPlace
from overlapsim.cost.prices import PriceBook
from overlapsim.plan import Finding
from overlapsim.step.inputs import StepInputs
from overlapsim.workload.layout import Layout
from overlapsim.workload.rank_map import GroupKind, RankMap

MOST_PIPELINES: Final = 16
"""Pipelines that are simulated one by one where jitter makes all of them differ."""
COUPLED: Final[tuple[GroupKind, ...]] = ("tp", "sp", "cp", "etp", "ep")
"""Groups whose ranks wait for each other within a layer."""
_COMPUTE: Final = ("gemm", "attention", "memory")


@dataclass(frozen=True)
class Station:
    """Speeds of the ranks that share a stage of one pipeline, as shares of healthy ones: the slowest rank sets them.

    Attributes
    ----------
    compute : of kernels
    nic, nvlink : of links between nodes, and within one
    """

    compute: float = 1.0
    nic: float = 1.0
    nvlink: float = 1.0

    def prices(self, prices: PriceBook) -> PriceBook:
        """The same prices at these speeds."""
        if self.compute < 1:
            for family in _COMPUTE:
                prices = prices.scaled(family, 1 / self.compute)
        if self.nic < 1 or self.nvlink < 1:
            prices = replace(prices, groups={name: self._slowed(place) for name, place in prices.groups.items()})
        return prices

    def _slowed(self, place: GroupPlace) -> GroupPlace:
        share = self.nvlink if place.nodes == 1 else min(self.nic, self.nvlink)
        return place if share == 1 else replace(place, slower=place.slower / share)


HEALTHY: Final = Station()


@dataclass(frozen=True)
class Replica:
    """One pipeline that is simulated.

    Attributes
    ----------
    stations : of each pipeline device
    number : of the pipeline, by which its jitter is drawn
    """

    stations: tuple[Station, ...]
    number: int = 0


def coupled_ranks(inputs: StepInputs, rank: int = 0) -> tuple[int, ...]:
    """Ranks of a stage that wait for each other within a layer, rising: by tensor, sequence and expert groups.

    Where experts are dealt over data-parallel ranks, the pipelines of these ranks are one.
    """
    return _coupled(inputs.layout, inputs.rank_order, rank)


@lru_cache(maxsize=1024)
def _coupled(layout: Layout, order: tuple[str, ...], rank: int) -> tuple[int, ...]:
    ranks = RankMap(layout, order)
    kinds = [kind for kind in COUPLED if ranks.size(kind) > 1]
    found, new = {rank}, [rank]
    while new:
        # Ranks of one group find the same others: each group is spelled out once.
        groups = {(kind, ranks.base(kind, one)) for one in new for kind in kinds}
        new = list({other for kind, base in groups for other in ranks.group(kind, base)} - found)
        found.update(new)
    return tuple(sorted(found))


def num_pipelines(inputs: StepInputs) -> int:
    """Pipelines of the job that only meet when gradients are summed."""
    layout = inputs.layout
    return layout.world_size // layout.pp // len(coupled_ranks(inputs))


def replicas(inputs: StepInputs) -> tuple[tuple[Replica, ...], tuple[Finding, ...]]:
    """Pipelines to simulate: those that are perturbed, and one for all that are not; all with jitter.

    Returns
    -------
    replicas : tuple of Replica
        At least one; those that are alike once, but for jitter.
    findings : tuple of Finding
        ``replicas_left_out`` where jitter would ask for more than `MOST_PIPELINES`.

    Raises
    ------
    UsageError
        If a perturbed rank or node is not in the layout.
    """
    layout, perturbation = inputs.layout, inputs.perturbation
    stations = _stations(inputs)
    total = num_pipelines(inputs)
    findings: tuple[Finding, ...] = ()
    healthy = (HEALTHY,) * layout.pp
    perturbed = [tuple(found.get(device, HEALTHY) for device in range(layout.pp)) for found in stations.values()]
    if not perturbation.jitter:
        rest = [healthy] if len(perturbed) < total else []
        return tuple(Replica(kinds) for kinds in dict.fromkeys((*rest, *perturbed))), findings
    kinds = [*perturbed, *([healthy] * (total - len(perturbed)))]
    if total > MOST_PIPELINES:
        message = f"jitter is drawn for {MOST_PIPELINES} of {total} pipelines; the slowest of all may be slower"
        findings += (Finding("replicas_left_out", message),)
    return tuple(Replica(kind, number) for number, kind in enumerate(kinds[:MOST_PIPELINES])), findings


def _stations(inputs: StepInputs) -> Mapping[int, dict[int, Station]]:
    """Perturbed stations by pipeline (its lowest rank on the first stage) and device."""
    world, per_node = inputs.layout.world_size, inputs.cluster.node.num_devices
    perturbation = inputs.perturbation
    found: dict[int, dict[int, Station]] = {}

    def lower(rank: int, **shares: float) -> None:
        pipeline, device = _where(inputs, rank)
        station = found.setdefault(pipeline, {}).get(device, HEALTHY)
        slower = {name: min(getattr(station, name), share) for name, share in shares.items()}
        found[pipeline][device] = replace(station, **slower)

    for entry in perturbation.places("slow", world):
        lower(entry.place, compute=entry.share)
    for entry in perturbation.places("nvlink", world):
        lower(entry.place, nvlink=entry.share)
    for entry in perturbation.places("nic", -(-world // per_node)):
        for rank in range(entry.place * per_node, min(world, (entry.place + 1) * per_node)):
            lower(rank, nic=entry.share)
    return found


def _where(inputs: StepInputs, rank: int) -> tuple[int, int]:
    """Pipeline and device of a rank."""
    stride, size = RankMap(inputs.layout, inputs.rank_order).grid("pp")["pp"]
    device = rank // stride % size
    return min(other - device * stride for other in coupled_ranks(inputs, rank)), device
