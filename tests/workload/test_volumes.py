"""Bytes that leave a GPU in a layer's forward pass, summed over the operator graph, against MegaScale-MoE's formulas.

arXiv 2505.11432, equations 1 to 4; equation 2 (sequence parallelism) is twice what its own tensors hold, so bytes are
counted from shapes: A2A of queries, keys and values b s h (1 + 2/m)(n-1)/n^2, of attention's output b s h (n-1)/n^2.
"""

from __future__ import annotations

import pytest

from overlapsim.cost.structural import bus_factor
from overlapsim.workload.build import GraphBuilder, Which
from overlapsim.workload.layout import Layout
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.operators import CollectiveOp
from overlapsim.workload.presets import load_preset
from overlapsim.workload.recipe import Dispatcher, Recipe

N, SEQ = 8, 8192
# Queries for each key, experts of a token; ratios as tabulated: SP over TP in attention, EP (A2A) over TP in experts.
MODELS = {
    "internal-352b": (4, 3, 0.156, 0.375),
    "megascale-mixtral-8x7b": (4, 2, 0.156, 0.25),
    "megascale-mixtral-8x22b": (6, 2, 0.146, 0.25),
    "megascale-hunyuan-large": (10, 1, 0.1375, 0.125),
    "megascale-phi-3.5-moe": (4, 2, 0.156, 0.25),
    "megascale-deepseekmoe": (1, 6, 0.25, 0.75),
}


def sent(model: ModelSpec, layout: Layout, room: str, dispatcher: Dispatcher = "all_to_all", which: Which = "forward"):
    """Bytes that one GPU sends in one pass of a layer, for ``attn`` or routed experts (``moe``)."""
    graph = GraphBuilder(model, layout, Recipe(dispatcher=dispatcher), 1, SEQ).layer(model.layers[0], which)
    return sum(
        op.size_bytes * bus_factor(op.kind, op.ranks)
        for op in graph.operators
        if isinstance(op, CollectiveOp) and op.name.startswith(f"{room}.") and not op.name.startswith("moe.shared")
    )


@pytest.mark.parametrize("name", MODELS)
def test_forward_volumes_of_the_six_models(name: str) -> None:
    model, (m, k, sp_over_tp, ep_over_tp) = load_preset(name), MODELS[name]
    whole = 2 * SEQ * model.hidden * (N - 1) / N
    tp, sp = Layout(tp=N, ep=1, etp=N), Layout(sp=N, ep=N)
    assert sent(model, tp, "attn") == pytest.approx(2 * whole, rel=1e-3)
    assert sent(model, sp, "attn") == pytest.approx(whole * (2 + 2 / m) / N, rel=1e-3)
    assert sent(model, tp, "moe", "all_gather") == pytest.approx(2 * whole, rel=1e-3)
    assert sent(model, sp, "moe") == pytest.approx(2 * k / N * whole, rel=1e-3)
    # Gathered tokens cost what tensor parallelism does, whatever top-k is.
    assert sent(model, sp, "moe", "all_gather") == pytest.approx(2 * whole, rel=1e-3)
    # The tabulated ratios, rounded as they are there.
    assert sent(model, sp, "attn") / sent(model, tp, "attn") == pytest.approx(sp_over_tp, abs=6e-4)
    assert sent(model, sp, "moe") / sent(model, tp, "moe", "all_gather") == pytest.approx(ep_over_tp, rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_backward_mirrors_forward(name: str) -> None:
    """Equal volumes, but for what tensor parallelism gathers again for its weight gradient (recipe, not paper)."""
    model = load_preset(name)
    sp = Layout(sp=N, ep=N)
    for room in ("attn", "moe"):
        assert sent(model, sp, room, which="backward") == pytest.approx(sent(model, sp, room))
    tp = Layout(tp=N, ep=1, etp=N)
    again = 2 * SEQ * model.hidden * (N - 1) / N
    assert sent(model, tp, "attn", which="backward") == pytest.approx(sent(model, tp, "attn") + again, rel=1e-3)
