"""Dispatch and combine: tables of kernels for experts, exchange against gather, and cases that users reported."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Final

from overlapsim.accuracy.moe_dispatch_cases import FINDINGS as CASE_FINDINGS
from overlapsim.accuracy.moe_dispatch_cases import case_rows
from overlapsim.accuracy.suite import Row
from overlapsim.cost.collective import CollectiveModel
from overlapsim.cost.expected import crossover_top_k
from overlapsim.hardware.catalogue import bundled
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.profile import CurveKey
from overlapsim.plan import Finding
from overlapsim.step.machine import machine_prices
from overlapsim.units import dtype_bytes
from overlapsim.workload.build_dispatch import FP8_BYTES, dispatch
from overlapsim.workload.build_part import Part, Tokens
from overlapsim.workload.layout import Layout
from overlapsim.workload.model import MoE
from overlapsim.workload.operators import CollectiveKind, CollectiveOp
from overlapsim.workload.presets import load_preset
from overlapsim.workload.recipe import Recipe, with_dispatch
from overlapsim.workload.recorder import Recorder

MODEL: Final = "deepseek-v3"
NODE: Final = 8
METHODS: Final[Mapping[str, str]] = {
    "normal": "deepep:dtype=fp8,sms={sms}",
    # Top-4 of the nodes is named for the first version's table alone.
    "v2": "deepep_v2:dtype=fp8,sms={sms},node_limit={nodes}",
    "low-latency": "deepep_low_latency:dtype=fp8",
    "library": "all_to_all",
    "hybrid": "hybrid_ep:sms={sms}",
}
EXCHANGE: Final = "h800-sxm8"
TOKENS, HIDDEN, RANKS = 16384, 4096, 8
GATHER_US: Final[Mapping[CollectiveKind, float]] = {"all_gather": 768.0, "reduce_scatter": 790.0}
"""Figure 7 of arXiv 2505.11432 (hwprofiles/SOURCES.md, MSMOE-FIG7)."""
FINDINGS: Final = (
    Finding(
        "table_counts_local",
        "DeepEP's bandwidths are taken to count copies that stay on their GPU or node: then 16 ranks are bound by "
        "NVLink (half of what is counted never leaves the node), 32 and 64 by the NIC, and 43, 58 and 51 GB/s follow "
        "from one rate of each link; counted without them, a NIC would be faster at 32 ranks than at 16",
    ),
    Finding(
        "table_machine_assumed",
        "DeepEP's second table names architectures: SM90 is taken as H100 and SM100 as B200; over the NVLink of an "
        "H800 its 90 GB/s at 16 ranks is out of reach",
    ),
    Finding(
        "flight_split_assumed",
        "of a low-latency dispatch only the whole is published: issue and receive are priced as plain passes over "
        "memory, and what is left of one row is the flight's latency",
    ),
    Finding("figure_tokens_assumed", "figure 7 does not print its tokens: 16384 are assumed; ratios do not need them"),
    Finding(
        "report_tokens_assumed",
        "a report names 9164 us for the library's exchange over 64 H100 and 4626 for HybridEP, and no tokens: 4096 of "
        "DeepSeek-V3's shape are assumed",
    ),
)


def dispatch_rows() -> tuple[tuple[Row, ...], tuple[Finding, ...]]:
    """Rows of all groups, and what is believed in them."""
    return (*_table_rows(), *_exchange_rows(), *case_rows()), (*FINDINGS, *CASE_FINDINGS)


@cache
def published() -> tuple[Mapping[str, str], ...]:
    """Rows of ``tables/moe/dispatch.csv``."""
    text = (bundled() / "tables" / "moe" / "dispatch.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def predicted(table: str, cluster: str, ranks: int, sms: int, tokens: int, direction: str, unit: str) -> float:
    """What a row of the tables reads: microseconds of all kernels, or GB/s of one GPU, local copies counted."""
    model = load_preset(MODEL)
    layer = next(layer for layer in model.layers if isinstance(layer.mlp, MoE))
    moe = layer.mlp
    assert isinstance(moe, MoE)
    nodes, layout = -(-ranks // NODE), Layout(ep=ranks, dp=ranks)
    recipe = with_dispatch(Recipe(), METHODS[table].format(sms=sms, nodes=nodes))
    part = Part(model, layer, layout, recipe, Tokens.of(layout, 1, tokens))
    recorder, back = Recorder("fwd", model.dtype), direction == "combine"
    dispatch(recorder, part, moe, "moe.combine" if back else "moe.dispatch", "fwd", back=back)
    prices = machine_prices(load_cluster(cluster).with_nodes(nodes), layout)
    operators = recorder.graph().operators
    if unit == "us":
        return 1e6 * sum(prices.operator_s(op) for op in operators)
    (op,) = (op for op in operators if isinstance(op, CollectiveOp))
    assert op.route is not None
    copies = op.route.nodes_of_token(nodes) if nodes > 1 else op.route.ranks_of_token(ranks, nodes)
    element = dtype_bytes(model.dtype) if back else FP8_BYTES
    return tokens * copies * model.hidden * element / prices.operator_s(op) / 1e9


def _table_rows() -> Iterator[Row]:
    for entry in published():
        fitted = entry["fitted"] == "yes"
        where = f"cluster={entry['cluster']}|ranks={entry['ranks']}|sms={entry['sms']}|{entry['direction']}"
        value = predicted(
            entry["table"],
            entry["cluster"],
            int(entry["ranks"]),
            int(entry["sms"]),
            int(entry["tokens"]),
            entry["direction"],
            entry["unit"],
        )
        group = f"dispatch {entry['table']}{' (fitted)' if fitted else ''}"
        yield _row(group, where, float(entry["value"]), value, entry["unit"], fitted=fitted)


def _exchange_rows() -> Iterator[Row]:
    """Exchange against gather on eight H800 (figure 7): its curve is the machine's, the rest is predicted."""
    cluster = load_cluster(EXCHANGE)
    gathered = float(TOKENS * HIDDEN * dtype_bytes("bf16"))
    curve = cluster.curves[CurveKey("all_to_all", RANKS)]
    exchange = CollectiveModel(cluster, "all_to_all", RANKS)
    gathers = {kind: CollectiveModel(cluster, kind, RANKS) for kind in GATHER_US}
    for size, seconds in zip(curve.size_bytes, curve.time_s, strict=True):
        copies = round(size * RANKS / gathered)
        yield _row(
            "exchange (fitted)",
            f"top_k={copies}",
            seconds * 1e6,
            float(exchange.seconds(size)) * 1e6,
            "us",
            fitted=True,
        )
    for kind, model in gathers.items():
        seconds = float(model.seconds(gathered))
        yield _row("gather", kind, GATHER_US[kind], seconds * 1e6, "us", fitted=False)
        ratio = seconds / float(exchange.seconds(gathered))
        yield _row("exchange over gather", f"top_k=8|{kind}", GATHER_US[kind] / 1030.0, ratio, "ratio", fitted=False)
    top_k = crossover_top_k(gathers["all_gather"], exchange, gathered)
    yield _row("exchange over gather", "crossover", 8 * 768.0 / 1030.0, top_k, "top-k", fitted=False)


def _row(group: str, name: str, measured: float, value: float, unit: str, *, fitted: bool) -> Row:
    return Row(f"{group}|{name}", group, measured, value, 0.85 * value, 1.18 * value, unit, fitted)
