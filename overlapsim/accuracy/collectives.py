"""Suite ``collectives``: collective times, one table left out at a time, by platform, test and size regime."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from overlapsim.accuracy.collective_data import score_data
from overlapsim.accuracy.collective_tables import load_split
from overlapsim.accuracy.collective_tests import (
    Scored,
    Tables,
    curve_tests,
    fabric_tests,
    pcie_tests,
    structural_tests,
)
from overlapsim.accuracy.progress import counted
from overlapsim.accuracy.suite import Row, Suite, score
from overlapsim.cost.base import Spread
from overlapsim.cost.collective import NEIGHBOURS, CollectiveModel
from overlapsim.cost.expected import crossover_top_k
from overlapsim.cost.fabric import FABRIC_PARAMETERS
from overlapsim.cost.fitted import FABRIC_FITTED, FABRIC_KEY, FABRIC_PRIOR, FIT_PRIOR, REGIMES
from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import Finding

SHOWN: Final[Mapping[str, str]] = {
    "small": "below 64 KiB",
    "middle": "64 KiB to 64 MiB",
    "large": "from 64 MiB",
}
"""Size regimes in names of groups."""
_PRIORS: Final[Mapping[str, Spread]] = {
    "unseen ranks between tables": NEIGHBOURS,
    "another site": Spread(0.90, 1.15, "prior"),
    "another site, listed": Spread(0.6, 1.6, "prior"),
    "ranks and sizes beyond the table": Spread(0.9, 1.1, "prior"),
    "another run": FABRIC_FITTED,
    "in the fabric's fit": FABRIC_FITTED,
    "fabric's other tables": FABRIC_FITTED,
    "fabric not measured": FABRIC_PRIOR,
}
_LEAST: Final = 20
# Gathered bytes at which the crossover of all-to-all and all-gather is printed: 8192 tokens of 7168 bf16 on 8 ranks
# are 112 MiB.
_CROSSOVER_MIB: Final = (28, 56, 112, 224)


def evaluate(data: Path | None) -> Suite:
    """Score the bundled tables, or a table of your own.

    Parameters
    ----------
    data : CSV with ``source_table,hardware,nodes,ranks,collective,size_bytes,time_us`` (`collective_tables.read_data`)

    Returns
    -------
    Suite
        Groups are named ``PLATFORM TEST, REGIME``. 90 % ranges of a platform come from the other platforms' errors in
        the same test and regime; where there are none, from the stated priors.
    """
    if data is not None:
        digest = hashlib.sha256(data.read_bytes()).hexdigest() if data.is_file() else ""
        rows, findings = score_data(data)
        return score("collectives", rows, digest, findings=findings)
    split, digest = load_split()
    tables = Tables(split, load_cluster)
    scored = list(counted("tests of collectives", all_tests(tables)))
    notes: dict[str, Any] = {
        "bars, median/p95 in %": bars(scored, split["bars"]),
        "hybrid of unseen ranks, median/p95 in %": _hybrid(tables, scored),
        "top-k where all-to-all takes as long as all-gather, 8 ranks": crossovers(),
        "fabric constants": fabric_constants(split),
        "spikes left out": {table: tables.spikes(table) for table in _tables_of(split) if tables.spikes(table)},
    }
    return score("collectives", to_rows(scored), digest, findings=not_calibrated(split), notes=notes)


def all_tests(tables: Tables) -> Iterable[Scored]:
    """Every test of the split."""
    split = tables.split
    for platform in (*split["structural"], *split["two_and_four"]):
        yield from structural_tests(tables, platform)
    for platform in split["pcie"]:
        yield from pcie_tests(tables, platform)
    yield from curve_tests(tables, "library version", split["versions"])
    yield from curve_tests(tables, "library version, listed", split["versions_listed"])
    yield from curve_tests(tables, "another site", split["sites"])
    yield from curve_tests(tables, "another site, listed", split["sites_listed"])
    yield from curve_tests(tables, "ranks and sizes beyond the table", split["beyond"])
    yield from fabric_tests(tables)


def regime_name(size_bytes: float) -> str:
    """Name of the size regime."""
    return [name for name, start in REGIMES if size_bytes >= start][-1]


def to_rows(scored: Sequence[Scored]) -> list[Row]:
    """Rows with the range that other platforms' errors give."""
    ratios: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in scored:
        ratio = one.row.time_s / one.predicted_s
        ratios[one.test, regime_name(one.row.size_bytes)][one.platform].append(ratio)
    rows = []
    for one in scored:
        regime = regime_name(one.row.size_bytes)
        by_platform = ratios[one.test, regime]
        others = [ratio for platform, values in by_platform.items() if platform != one.platform for ratio in values]
        if one.test in _PRIORS or len(others) < _LEAST:
            prior = _PRIORS.get(one.test, FIT_PRIOR)
            low, high = prior.low, prior.high
        else:
            low, high = (float(np.quantile(others, q)) for q in (0.05, 0.95))
        what = f"{one.row.kind} n{one.row.ranks} N{one.row.nodes} {one.row.size_bytes:.0f}"
        rows.append(
            Row(
                id=f"{one.test}|{one.table}|{what}",
                group=f"{one.platform} {one.test}, {SHOWN[regime]}",
                measured=one.row.time_s * 1e6,
                predicted=one.predicted_s * 1e6,
                low=one.predicted_s * min(low, 1.0) * 1e6,
                high=one.predicted_s * max(high, 1.0) * 1e6,
                unit="us",
                fitted=one.fitted,
            )
        )
    return rows


def spread_of(scored: Iterable[Scored], tests: Sequence[str], leave_out: str = "") -> dict[str, tuple[float, float]]:
    """Central 90 % of measured over predicted by regime, over the named tests without one platform."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for one in scored:
        if one.test in tests and one.platform != leave_out and not one.fitted:
            ratios[regime_name(one.row.size_bytes)].append(one.row.time_s / one.predicted_s)
    return {
        name: (min(1.0, float(np.quantile(values, 0.05))), max(1.0, float(np.quantile(values, 0.95))))
        for name, values in ratios.items()
        if len(values) >= _LEAST
    }


def bars(scored: Sequence[Scored], asked: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Median and p95 against what is asked, by platform, from 64 KiB and from 64 MiB (both regimes together)."""
    found: dict[str, Any] = {}
    for test, limits in asked.items():
        for platform in dict.fromkeys(one.platform for one in scored if one.test == test):
            mine = [one for one in scored if one.test == test and one.platform == platform]
            for start, least in (("from_64_KiB", 2.0**16), ("from_64_MiB", 2.0**26)):
                errors = [abs(_error(one)) for one in mine if one.row.size_bytes >= least]
                if not errors or start not in limits:
                    continue
                median, p95 = 100 * float(np.median(errors)), 100 * float(np.quantile(errors, 0.95))
                met = "met" if median <= limits[start][0] and p95 <= limits[start][1] else "MISSED"
                shown = f"{median:.1f}/{p95:.1f} of {limits[start][0]}/{limits[start][1]} {met} ({len(errors)} points)"
                found[f"{platform} {test} {start}"] = shown
    return found


def crossovers() -> dict[str, str]:
    """Top-k at which an all-to-all dispatch over 8 ranks takes as long as an all-gather, by platform."""
    found = {}
    for name in ("h100-sxm8", "a100-sxm8", "h800-sxm8"):
        cluster = load_cluster(name)
        gather, exchange = (CollectiveModel(cluster, kind, 8) for kind in ("all_gather", "all_to_all"))
        if "prior" in (gather.basis, exchange.basis):
            continue
        tops = [crossover_top_k(gather, exchange, size * 2.0**20) for size in _CROSSOVER_MIB]
        shown = ", ".join(f"{top:.2f} at {size} MiB" for top, size in zip(tops, _CROSSOVER_MIB, strict=True))
        found[name] = f"{shown} (priced by {gather.basis}; measured on an H800 node: between 6 and 7)"
    return found


def fabric_constants(split: Mapping[str, Any]) -> dict[str, str]:
    """Small hop and NIC share of each fabric that was fitted."""
    found = {}
    for name, entry in split["fabrics"].items():
        fit = load_cluster(entry["cluster"]).fits.get(FABRIC_KEY)
        if fit is None:
            continue
        shown = []
        for key in ("tree_net", "ring_net", "pair_net", "tree_nic_efficiency", "pair_nic_efficiency"):
            if key in fit.parameters:
                value = fit.parameters[key]
                seconds = FABRIC_PARAMETERS[key][0] == "s"
                shown.append(f"{key} {value * 1e6:.1f} us" if seconds else f"{key} {value:.2f}")
        found[name] = ", ".join(shown)
    return found


def not_calibrated(split: Mapping[str, Any]) -> list[Finding]:
    """One finding for each platform without a collective fit or table."""
    found = []
    for name in split["not_calibrated"]:
        cluster = load_cluster(name)
        findings = CollectiveModel(cluster, "all_gather", min(8, cluster.node.num_devices)).findings
        found += [Finding(one.code, f"{name}: {one.message}") for one in findings]
    return found


def _hybrid(tables: Tables, scored: Sequence[Scored]) -> dict[str, str]:
    """Geometric mean of the 2- and 8-rank tables from 256 KiB to 64 MiB, the fit elsewhere: kept as a comparison."""
    found = {}
    for platform in tables.split["structural"]:
        known = {(row.kind, row.ranks, row.size_bytes): row.time_s for row in tables.rows(tables.table_of(platform))}
        errors = []
        for one in scored:
            row = one.row
            if (one.test, one.platform, row.ranks) != ("unseen ranks", platform, 4) or row.size_bytes < 2**16:
                continue
            pair = [known.get((row.kind, ranks, row.size_bytes)) for ranks in (2, 8)]
            seconds = one.predicted_s
            if 2**18 <= row.size_bytes < 2**26 and pair[0] is not None and pair[1] is not None:
                seconds = (pair[0] * pair[1]) ** 0.5
            errors.append(abs(seconds / row.time_s - 1))
        found[platform] = f"{100 * np.median(errors):.1f}/{100 * np.quantile(errors, 0.95):.1f} (4 ranks)"
    return found


def _tables_of(split: Mapping[str, Any]) -> list[str]:
    entries = [*split["platforms"].values(), *split["versions"], *split["versions_listed"], *split["sites"]]
    return [entry["table"] for entry in entries]


def _error(one: Scored) -> float:
    return one.predicted_s / one.row.time_s - 1
