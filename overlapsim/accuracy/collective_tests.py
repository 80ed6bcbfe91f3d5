"""Tests of the suite ``collectives``: predict each table from fits and curves that have not seen it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from overlapsim.accuracy.collective_tables import bundled_rows, curves_of
from overlapsim.calibration.fit_collective import CollectiveRow, fit_collective, split_spikes
from overlapsim.calibration.fit_fabric import fit_fabric
from overlapsim.cost.collective_curves import between_ranks
from overlapsim.cost.curve import Curve
from overlapsim.cost.fabric import FabricModel, fabric_prior
from overlapsim.cost.fitted import latency_constants
from overlapsim.cost.structural import OneNodeModel
from overlapsim.hardware.profile import Cluster, CurveKey, Fit, Source

RINGS: Final = ("all_reduce", "all_gather", "reduce_scatter")
MEASURED: Final = Source("measured", "AIC-COLL")
SLOW_SITE: Final = 1.3
"""A site is slow to launch if its smallest messages take this many times the platform's."""


@dataclass(frozen=True)
class Scored:
    """One prediction.

    Attributes
    ----------
    test, platform, table : what was asked, of which machine, from which table the measurement is
    row : the measurement
    predicted_s : the prediction
    fitted : True where the fit has seen the row
    """

    test: str
    platform: str
    table: str
    row: CollectiveRow
    predicted_s: float
    fitted: bool


class Tables:
    """Bundled tables and clusters of the suite, read once."""

    def __init__(self, split: Mapping[str, Any], load_cluster: Callable[[str], Cluster]) -> None:
        self.split, self._load = split, load_cluster
        self._rows: dict[str, list[CollectiveRow]] = {}
        self._clusters: dict[str, Cluster] = {}

    def rows(self, table: str) -> list[CollectiveRow]:
        """Rows of a table without its spikes."""
        if table not in self._rows:
            self._rows[table] = split_spikes(bundled_rows(table, self.split["dtype"]))[0]
        return self._rows[table]

    def spikes(self, table: str) -> int:
        """How many rows of a table are left out as stalls."""
        return len(split_spikes(bundled_rows(table, self.split["dtype"]))[1])

    def cluster(self, name: str) -> Cluster:
        """A bundled cluster."""
        if name not in self._clusters:
            self._clusters[name] = self._load(name)
        return self._clusters[name]

    def table_of(self, platform: str) -> str:
        """The platform's own table."""
        return str(self.split["platforms"][platform]["table"])

    def cluster_of(self, platform: str) -> Cluster:
        """The platform's cluster."""
        return self.cluster(self.split["platforms"][platform]["cluster"])


def platform_fit(rows: Sequence[CollectiveRow], cluster: Cluster, notes: str = "") -> Fit:
    """Structural fit of one platform's rows."""
    node = cluster.node
    return fit_collective(
        rows,
        architecture=cluster.device.architecture,
        link_bytes_per_s=node.nvlink_bandwidth_bytes_per_s,
        switch_reduction=node.switch_reduction,
        source=MEASURED,
        notes=notes,
    )


def structural_tests(tables: Tables, platform: str) -> Iterable[Scored]:
    """In the fit; unseen rank counts; reduce-scatter from all-gather and all-reduce."""
    table, cluster = tables.table_of(platform), tables.cluster_of(platform)
    rows = tables.rows(table)
    yield from _scored("in the fit", platform, table, rows, rows, cluster, fitted=True)
    for ranks in sorted({row.ranks for row in rows}):
        rest = [row for row in rows if row.ranks != ranks]
        unseen = [row for row in rows if row.ranks == ranks]
        for name, kinds in (("unseen ranks", RINGS), ("unseen ranks all_to_all", ("all_to_all",))):
            asked = [row for row in unseen if row.kind in kinds]
            yield from _scored(name, platform, table, [row for row in rest if row.kind in kinds], asked, cluster)
    others = [row for row in rows if row.kind in ("all_reduce", "all_gather")]
    asked = [row for row in rows if row.kind == "reduce_scatter"]
    yield from _scored("reduce_scatter from others", platform, table, others, asked, cluster)


def pcie_tests(tables: Tables, platform: str) -> Iterable[Scored]:
    """The middle rank count drawn between its neighbours: what can be done without NVLink."""
    table, cluster = tables.table_of(platform), tables.cluster_of(platform)
    rows = tables.rows(table)
    counts = sorted({row.ranks for row in rows})
    for ranks in counts[1:-1]:
        bare = _with_curves(cluster, [row for row in rows if row.ranks != ranks], table)
        for kind in sorted({row.kind for row in rows}):
            knots = between_ranks(bare, kind, ranks, 1)
            assert knots is not None
            for row in rows:
                if row.ranks == ranks and row.kind == kind:
                    seconds = float(np.interp(row.size_bytes, *knots))
                    yield Scored("unseen ranks between tables", platform, table, row, seconds, fitted=False)


def curve_tests(tables: Tables, name: str, entries: Iterable[Mapping[str, Any]]) -> Iterable[Scored]:
    """Another table of the same platform from the platform's own curves, at the site's floor where it has one."""
    for entry in entries:
        platform, table = entry["platform"], entry["table"]
        own, cluster = tables.rows(tables.table_of(platform)), tables.cluster_of(platform)
        curves = {key: Curve(points) for key, points in curves_of(own, platform).items()}
        rows = tables.rows(table)
        model: OneNodeModel | None = None
        floors = site_floors(rows)
        for row in rows:
            key = CurveKey(row.kind, row.ranks, row.nodes)
            curve = curves.get(key)
            if curve is None:
                model = model or _model(platform_fit(own, cluster), cluster)
                if not model.prices(row.kind):
                    continue
                seconds = float(model.seconds(row.kind, row.ranks, np.array([row.size_bytes]))[0])
            else:
                seconds = float(curve.seconds(row.size_bytes))
            floor, used = floors.get(key, (0.0, frozenset()))
            usual = float(np.median(curve.seconds(sorted(used)))) if curve is not None and used else 0.0
            slow = floor > SLOW_SITE * usual
            if slow and row.size_bytes in used:
                continue
            yield Scored(name, platform, table, row, max(seconds, floor if slow else 0.0), fitted=False)


def site_floors(rows: Iterable[CollectiveRow]) -> dict[CurveKey, tuple[float, frozenset[float]]]:
    """Floor of each curve, the median time of its three smallest sizes up to 256 KiB, and those sizes.

    The median, since one small message in three may be a stall or a stray; of fewer sizes the least time.
    """
    points: dict[CurveKey, list[tuple[float, float]]] = {}
    for row in rows:
        if row.size_bytes <= 2**18 and np.isfinite(row.time_s):
            points.setdefault(CurveKey(row.kind, row.ranks, row.nodes), []).append((row.size_bytes, row.time_s))
    found = {}
    for key, pairs in points.items():
        smallest = sorted(pairs)[:3]
        times = [time for _, time in smallest]
        found[key] = float(np.median(times)) if len(times) == 3 else min(times), frozenset(size for size, _ in smallest)
    return found


def fabric_tests(tables: Tables) -> Iterable[Scored]:
    """Across nodes: runs of one cloud from the others, what a fit has seen, other sites, and the prior alone."""
    fits: dict[str, tuple[Cluster, Fit]] = {}
    for name, entry in tables.split["fabrics"].items():
        cluster = tables.cluster(entry["cluster"])
        runs: list[str] = entry.get("runs", [])
        for run in runs:
            rest = [row for other in runs if other != run for row in tables.rows(other)]
            yield from _across(
                "another run", name, run, tables.rows(run), cluster, fabric_fit(rest, cluster).parameters
            )
        names = runs or entry["tables"]
        seen = [row for table in names for row in tables.rows(table)]
        fits[name] = cluster, fabric_fit(seen, cluster)
        for table in names:
            rows, fit = tables.rows(table), fits[name][1]
            yield from _across("in the fabric's fit", name, table, rows, cluster, fit.parameters, fitted=True)
            yield from _across("fabric not measured", name, table, rows, cluster, fabric_prior(cluster))
    for entry in tables.split["fabric_tests"]:
        cluster, fit = fits[entry["fabric"]]
        rows = tables.rows(entry["table"])
        yield from _across("fabric's other tables", entry["fabric"], entry["table"], rows, cluster, fit.parameters)


def fabric_fit(rows: Sequence[CollectiveRow], cluster: Cluster, notes: str = "") -> Fit:
    """Constants of a cluster's fabric."""
    base, hop = latency_constants(cluster)
    nics = cluster.node.num_nics * cluster.node.nic_bandwidth_bytes_per_s
    source = Source("measured", "NCCL-SITES", "medium")
    return fit_fabric(rows, base_s=base, hop_s=hop, nic_bytes_per_s=nics, source=source, notes=notes)


def _across(
    test: str,
    platform: str,
    table: str,
    rows: Sequence[CollectiveRow],
    cluster: Cluster,
    parameters: Mapping[str, float],
    *,
    fitted: bool = False,
) -> Iterable[Scored]:
    base, hop = latency_constants(cluster)
    nics = cluster.node.num_nics * cluster.node.nic_bandwidth_bytes_per_s
    for row in rows:
        model = FabricModel(parameters, base, hop, row.ranks, row.nodes, nics)
        seconds = float(model.seconds(row.kind, np.array([row.size_bytes]))[0])
        yield Scored(test, platform, table, row, seconds, fitted)


def _scored(
    test: str,
    platform: str,
    table: str,
    rows: Sequence[CollectiveRow],
    asked: Sequence[CollectiveRow],
    cluster: Cluster,
    *,
    fitted: bool = False,
) -> Iterable[Scored]:
    model = _model(platform_fit(rows, cluster), cluster)
    for row in asked:
        seconds = float(model.seconds(row.kind, row.ranks, np.array([row.size_bytes]))[0])
        yield Scored(test, platform, table, row, seconds, fitted)


def _model(fit: Fit, cluster: Cluster) -> OneNodeModel:
    return OneNodeModel(
        fit.parameters, cluster.device.architecture, fit.parameters["link_rate"], cluster.node.switch_reduction
    )


def _with_curves(cluster: Cluster, rows: Sequence[CollectiveRow], source: str) -> Cluster:
    return replace(cluster, curves=curves_of(rows, source))
