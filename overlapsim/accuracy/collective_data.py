"""Score of a user's table of collectives: which price each row got, and at which floor of the site."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final, cast

import numpy as np

from overlapsim.accuracy.collective_tables import Measured, read_data, refuse_bad
from overlapsim.accuracy.collective_tests import SLOW_SITE, site_floors
from overlapsim.accuracy.suite import Row
from overlapsim.cost.collective import CollectiveModel
from overlapsim.cost.fitted import fitted_price, regime_of
from overlapsim.errors import LayoutError, OverlapSimError, ProfileError
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.profile import Cluster, CurveKey
from overlapsim.plan import Finding
from overlapsim.workload.operators import CollectiveKind

REGIME_NAMES: Final = ("below 64 KiB", "64 KiB to 64 MiB", "from 64 MiB")
# Another machine of the same platform than the one that was measured, against the curve's own range.
_SITE_LOW, _SITE_HIGH = 0.97, 1.06


def score_data(path: Path) -> tuple[list[Row], list[Finding]]:
    """Rows of a user's table against the cluster that each names or that its hardware is recognised as.

    A site whose smallest messages take much longer than the platform's gets a floor: given in ``floor_us``, else the
    median of its three smallest sizes, which are then not scored. Rows without a time are predicted only (finding).

    Raises
    ------
    CalibrationError
        If the file is not in the format.
    """
    rows, findings = list[Row](), list[Finding]()
    tables: dict[str, list[Measured]] = {}
    for one in read_data(path):
        tables.setdefault(one.table, []).append(one)
    for table, members in tables.items():
        refuse_bad(table)
        found, said = _score_table(table, members)
        rows += found
        findings += said
    return rows, findings


def _score_table(table: str, members: list[Measured]) -> tuple[list[Row], list[Finding]]:
    rows, findings = list[Row](), dict[str, Finding]()
    prices = dict[tuple[str, CurveKey], _Price | None]()
    floors = site_floors(member.row for member in members)
    blank, left_out = 0, 0
    for one in members:
        key = CurveKey(one.row.kind, one.row.ranks, one.row.nodes)
        if not one.cluster:
            message = f"{table}: no bundled machine is recognised in {one.hardware!r}; name one in the column cluster"
            findings[message] = Finding("not_calibrated", message)
            continue
        if (one.cluster, key) not in prices:
            prices[one.cluster, key], said = _price(one.cluster, key)
            for finding in said:
                findings[finding.message] = Finding(finding.code, f"{table}: {finding.message}")
        price = prices[one.cluster, key]
        if price is None:
            continue
        floor, used = _floor(one, floors.get(key), price)
        if floor and one.row.size_bytes in used:
            left_out += 1
            continue
        if not math.isfinite(one.row.time_s):
            blank += 1
            seconds = max(price.seconds(one.row.size_bytes), floor)
            message = f"{table} line {one.line}: {key.collective} of {one.row.size_bytes:.0f} B: {seconds * 1e6:.4g} us"
            findings[message] = Finding("predicted", message)
            continue
        rows.append(_row(table, one, price, floor))
    if left_out:
        message = f"{table}: {left_out} smallest sizes give the site's floor and are not scored"
        findings[message] = Finding("site_floor", message)
    return rows, list(findings.values())


class _Price:
    """Price of one collective on one cluster, ranks dealt evenly to the nodes."""

    def __init__(self, cluster: Cluster, key: CurveKey) -> None:
        self.across = key.nodes > 1
        self._model: CollectiveModel | None = None
        full = key.ranks == key.nodes * cluster.node.num_devices
        known = CurveKey(key.collective, key.ranks, key.nodes) in cluster.curves
        self._fitted = None
        kind = cast(CollectiveKind, key.collective)
        if self.across and not full and not known:
            # Nodes that are not full: the model below fills them, the fabric's price does not ask.
            self._fitted = fitted_price(cluster, key.collective, key.ranks, key.nodes)
        if self._fitted is None:
            self._model = CollectiveModel(cluster, kind, key.ranks)
        self.basis = "fit" if self._model is None else self._model.basis
        self.findings = () if self._model is None else self._model.findings

    def seconds(self, size: float) -> float:
        if self._model is not None:
            return float(self._model.seconds(size))
        assert self._fitted is not None
        return float(self._fitted.seconds(np.array([size]))[0])

    def ends(self, size: float) -> tuple[float, float]:
        if self._model is not None:
            low, high = (float(end) for end in self._model.spread_ends(size))
            return (low * _SITE_LOW, high * _SITE_HIGH) if self.basis == "table" else (low, high)
        assert self._fitted is not None
        spread = self._fitted.spreads[int(regime_of(np.asarray(size)))]
        return spread.low, spread.high


def _price(name: str, key: CurveKey) -> tuple[_Price | None, tuple[Finding, ...]]:
    try:
        cluster = load_cluster(name).with_nodes(key.nodes)
        price = _Price(cluster, key)
    except (ProfileError, LayoutError) as error:
        return None, (Finding("not_calibrated", f"{key.collective} of {key.ranks} ranks: {_first_line(error)}"),)
    return price, price.findings


def _floor(
    one: Measured, found: tuple[float, frozenset[float]] | None, price: _Price
) -> tuple[float, frozenset[float]]:
    if math.isfinite(one.floor_s):
        return one.floor_s, frozenset()
    if found is None:
        return 0.0, frozenset()
    floor, used = found
    usual = float(np.median([price.seconds(size) for size in used]))
    return (floor, used) if floor > SLOW_SITE * usual else (0.0, frozenset())


def _row(table: str, one: Measured, price: _Price, floor: float) -> Row:
    size = one.row.size_bytes
    seconds = max(price.seconds(size), floor)
    low, high = price.ends(size)
    regime = REGIME_NAMES[int(regime_of(np.asarray(size)))]
    where = "one node" if one.row.nodes == 1 else f"{one.row.nodes} nodes"
    return Row(
        id=f"{table}|line {one.line}|{one.row.kind} n{one.row.ranks} N{one.row.nodes} {size:.0f}",
        group=f"{one.cluster} {where} by {price.basis}, {regime}",
        measured=one.row.time_s * 1e6,
        predicted=seconds * 1e6,
        low=seconds * low * 1e6,
        high=seconds * high * 1e6,
        unit="us",
        fitted=False,
    )


def _first_line(error: OverlapSimError) -> str:
    return str(error).splitlines()[0]
