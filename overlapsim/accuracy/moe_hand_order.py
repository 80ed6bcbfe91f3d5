"""The order in which MegaScale-MoE's authors issue a layer's operators, as far as they say, the rest by their rules.

Printed (arXiv 2505.11432, Fig. 8b): under the gather of the gradient of the experts' output the norm and the activation
are rebuilt; the rebuilt norm is dispatched again under the backward of the second expert matrix. Reconstructed by the
same rules: gradients of weights fill the gaps of exchanges, those of the first expert matrix under the exchange of
their input's gradient, that of the output projection under the exchange of its input's; the attention output is
exchanged again under the backward of the norm; the first norm, and the norm and activation of the layer below, are
rebuilt under the exchange of the gradients of queries, keys and values. In the forward little is independent: a shared
expert runs beside dispatch and combine.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Final

from overlapsim.strategy.ordering import BESIDE, arrange_by
from overlapsim.workload.operators import CollectiveOp, GemmOp, GroupedGemmOp, KernelOp, OperatorGraph

Rule = tuple[str, str, str]
"""Operator name, pass, and what it is: an exchange, a GEMM or another kernel."""
FORWARD: Final[tuple[Rule, ...]] = (
    ("moe.dispatch", "fwd", "exchange"),
    ("moe.shared.fc1", "fwd", "gemm"),
    ("moe.permute", "fwd", "kernel"),
    ("moe.fc1", "fwd", "gemm"),
    ("moe.act", "fwd", "kernel"),
    ("moe.fc2", "fwd", "gemm"),
    ("moe.combine", "fwd", "exchange"),
    ("moe.shared.act", "fwd", "kernel"),
    ("moe.shared.fc2", "fwd", "gemm"),
    ("moe.unpermute", "fwd", "kernel"),
)
BACKWARD: Final[tuple[Rule, ...]] = (
    ("moe.combine", "dgrad", "exchange"),
    ("mlp.norm", "recompute", "kernel"),
    ("moe.act", "recompute", "kernel"),
    ("moe.shared.fc2", "dgrad", "gemm"),
    ("moe.shared.fc2", "wgrad", "gemm"),
    ("moe.shared.act", "dgrad", "kernel"),
    ("moe.shared.fc1", "dgrad", "gemm"),
    ("moe.unpermute", "dgrad", "kernel"),
    ("moe.dispatch", "recompute", "exchange"),
    ("moe.fc2", "dgrad", "gemm"),
    ("moe.fc2", "wgrad", "gemm"),
    ("moe.act", "dgrad", "kernel"),
    ("moe.fc1", "dgrad", "gemm"),
    ("moe.dispatch", "dgrad", "exchange"),
    ("moe.permute", "recompute", "kernel"),
    ("moe.fc1", "wgrad", "gemm"),
    ("moe.shared.fc1", "wgrad", "gemm"),
    ("attn.out", "recompute", "exchange"),
    ("moe.permute", "dgrad", "kernel"),
    ("moe.router", "dgrad", "kernel"),
    ("moe.router", "dgrad", "gemm"),
    ("mlp.norm", "dgrad", "kernel"),
    ("attn.out", "dgrad", "gemm"),
    ("attn.core", "dgrad", "exchange"),
    ("attn.out", "wgrad", "gemm"),
    ("moe.router", "wgrad", "gemm"),
    ("attn.core", "dgrad", "kernel"),
    ("attn.out", "dgrad", "exchange"),
    ("attn.norm", "recompute", "kernel"),
    ("attn.rope", "dgrad", "kernel"),
    ("attn.qkv", "dgrad", "gemm"),
    ("attn.qkv", "wgrad", "gemm"),
    ("attn.norm", "dgrad", "kernel"),
)
COMM: Final = f"{BESIDE} comm"
BELOW: Final = (("mlp.norm", "recompute", "kernel"), ("moe.act", "recompute", "kernel"))
"""Of the layer below, rebuilt under the last exchange of the one above."""
UNDER: Final[Rule] = ("attn.norm", "recompute", "kernel")


def hand_made(graph: OperatorGraph, *, layers: int = 1, sms: int = 0) -> OperatorGraph:
    """A layer's forward or backward in the authors' order, all exchanges on one stream beside computation.

    Parameters
    ----------
    graph : of one layer with attention's sequence and experts over the node, or of several (`adjacent`)
    layers : in the graph, all alike
    sms : SMs of every exchange; 0: the library's

    Examples
    --------
    >>> from overlapsim.workload.build import GraphBuilder
    >>> from overlapsim.workload.layout import Layout
    >>> from overlapsim.workload.presets import load_model
    >>> from overlapsim.workload.recipe import Recipe
    >>> from overlapsim.workload.recompute import Recompute
    >>> model = load_model("internal-352b")[0]
    >>> builder = GraphBuilder(model, Layout(sp=8, ep=8), Recipe(), 1, 8192, Recompute.parse("sar"))
    >>> [f"{op.name} {op.pass_}" for op in hand_made(builder.layer(model.layers[0], "backward")).operators][:4]
    ['moe.unpermute dgrad', 'moe.combine dgrad', 'mlp.norm recompute', 'moe.act recompute']
    """
    size = len(graph.operators) // layers
    ranks = {rule: number for rules in (FORWARD, BACKWARD) for number, rule in enumerate(rules)}
    last = -1
    keys: list[tuple[int, int, int]] = []
    for position, op in enumerate(graph.operators):
        rule, layer = _rule(op), position // size
        # What no rule names goes on behind what stands before it.
        rank = ranks.get(rule, last if position % size else -1)
        last = rank if rule in ranks else last if position % size else -1
        keys.append((layer - 1, ranks[UNDER], position) if layer and rule in BELOW else (layer, rank, position))
    arranged = arrange_by(graph, _in_turn(graph, keys), sms)
    streams = (COMM if stream.startswith(BESIDE) else stream for stream in arranged.streams)
    return replace(arranged, streams=tuple(streams))


def _rule(op: GemmOp | CollectiveOp | KernelOp) -> Rule:
    if isinstance(op, CollectiveOp):
        return op.name, op.pass_, "exchange"
    multiplies = isinstance(op, GemmOp) or isinstance(op.work, GroupedGemmOp)
    return op.name, op.pass_, "gemm" if multiplies else "kernel"


def _in_turn(graph: OperatorGraph, keys: list[tuple[int, int, int]]) -> list[int]:
    """Positions by key; what one needs goes before it, as late as that allows."""
    # An operator without a rule of its own, or with a late one, is pulled forward by the first that needs it.
    for src, dst in sorted(graph.dependencies, key=lambda edge: -edge[1]):
        keys[src] = min(keys[src], (keys[dst][0], keys[dst][1], src))
    waiting = [0] * len(keys)
    for _, dst in graph.dependencies:
        waiting[dst] += 1
    ready = [key for position, key in enumerate(keys) if not waiting[position]]
    heapq.heapify(ready)
    order = []
    while ready:
        position = heapq.heappop(ready)[2]
        order.append(position)
        for src, dst in graph.dependencies:
            if src == position:
                waiting[dst] -= 1
                if not waiting[dst]:
                    heapq.heappush(ready, keys[dst])
    return order
