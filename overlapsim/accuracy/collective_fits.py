"""Shipped collective constants made again from the bundled tables: ``hwprofiles/fits/collective``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from overlapsim.accuracy.collective_tests import Scored, Tables, fabric_fit, platform_fit, structural_tests
from overlapsim.accuracy.collectives import spread_of
from overlapsim.calibration.fit_collective import fit_document, with_spread
from overlapsim.hardware.profile import Cluster, Fit, Source

# Same links or slower ones of the same kind, and no table of their own that a fit could use.
SISTERS: Final[Mapping[str, tuple[str, str]]] = {
    "a800-sxm8": ("a100-sxm8", "constants of a100-sxm8; what runs at the rate of the link is slowed to its 8 NVLinks"),
    "h800-sxm8": ("h100-sxm8", "constants of h100-sxm8; what runs at the rate of the link is slowed to its 8 NVLinks"),
    "h20-sxm8": ("h100-sxm8", "constants of h100-sxm8: the same links"),
    "a100-40gb-sxm8": ("a100-sxm8", "constants of a100-sxm8: the same links"),
}
UNSEEN: Final = ("unseen ranks", "reduce_scatter from others", "unseen ranks all_to_all")


def refit(tables: Tables, split_sha256: str) -> dict[str, dict[str, Any]]:
    """Fit every platform and fabric of the split.

    Ranges of a fit are what rank counts and collectives left out show on the five 8-GPU platforms; a sister's are the
    stated prior.

    Returns
    -------
    dict of str to dict
        Content of each fit file by cluster name.
    """
    split = tables.split
    platforms = (*split["structural"], *split["two_and_four"])
    scored = [one for platform in platforms for one in structural_tests(tables, platform)]
    spread = spread_of([one for one in scored if one.platform in split["structural"]], UNSEEN)
    fits: dict[str, list[Fit]] = {}
    for platform in platforms:
        table, cluster = tables.table_of(platform), tables.cluster_of(platform)
        mine = [one for one in scored if one.platform == platform and one.row.size_bytes >= 2.0**16]
        notes = (
            f"table {table}, half precision; split {split_sha256[:12]}; from 64 KiB, median/p95 of the error: "
            f"{_shown(mine, ('in the fit',))} % on rows fitted, {_shown(mine, UNSEEN[:2])} % on rank counts and "
            "reduce-scatter left out; spread from what was left out on the five 8-GPU platforms"
        )
        fit = with_spread(platform_fit(tables.rows(table), cluster), spread)
        fits[cluster.name] = [replace(fit, source=Source("measured", "FIT-COLL", "high"), notes=notes)]
    for name, (base, notes) in SISTERS.items():
        source = Source("derived", "SISTER FIT-COLL", "medium")
        fits[name] = [replace(fits[base][0], source=source, num_points=0, spread={}, notes=notes)]
    for entry in split["fabrics"].values():
        names = entry.get("runs") or entry["tables"]
        cluster = _with_own_latency(tables.cluster(entry["cluster"]), fits)
        rows = [row for table in names for row in tables.rows(table)]
        fit = fabric_fit(rows, cluster, f"tables {', '.join(names)}; split {split_sha256[:12]}")
        source = Source("measured", "FIT-FABRIC", "medium")
        fits.setdefault(entry["cluster"], []).append(replace(fit, source=source))
    return {name: fit_document(found, name) for name, found in fits.items()}


def _with_own_latency(cluster: Cluster, fits: Mapping[str, Sequence[Fit]]) -> Cluster:
    """Latency inside a node as just fitted, for the cluster itself or the one whose node it has."""
    base = next((name for name in (cluster.name, "h100-sxm8") if name in fits and cluster.name.startswith(name)), None)
    return cluster if base is None else replace(cluster, fits={"collective.nccl": fits[base][0]})


def _shown(scored: Sequence[Scored], tests: Sequence[str]) -> str:
    errors = [abs(one.predicted_s / one.row.time_s - 1) for one in scored if one.test in tests]
    return f"{100 * np.median(errors):.1f}/{100 * np.quantile(errors, 0.95):.1f}"
