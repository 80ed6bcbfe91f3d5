"""What waits for rebuilt tensors: exactly the operators of the backward that read them."""

from __future__ import annotations

import pytest

from overlapsim.workload.build import GraphBuilder
from overlapsim.workload.layout import Layout
from overlapsim.workload.operators import CollectiveOp, OperatorGraph
from overlapsim.workload.presets import load_model
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.recompute import Recompute

INTERNAL = load_model("internal-352b")[0]


def backward(name: str, layout: Layout, recompute: str, **recipe) -> OperatorGraph:
    model = load_model(name)[0]
    builder = GraphBuilder(model, layout, Recipe(**recipe), 1, 8192, Recompute.parse(recompute))
    return builder.layer(model.layers[-1], "backward")


def waits(graph: OperatorGraph) -> dict[str, set[str]]:
    """Readers of each rebuilt operator, by name and pass."""
    found: dict[str, set[str]] = {}
    for src, dst in graph.dependencies:
        if graph.operators[src].pass_ == "recompute":
            reader = graph.operators[dst]
            found.setdefault(graph.operators[src].name, set()).add(f"{reader.name} {reader.pass_}")
    return found


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
def test_readers_of_selective_rematerialisation(dispatcher: str) -> None:
    """Fig. 9 of MegaScale-MoE: what is not kept is rebuilt for weight gradients, and the norm for a second dispatch."""
    found = waits(backward("internal-352b", Layout(sp=8, ep=8), "sar", dispatcher=dispatcher))
    assert found["attn.norm"] == {"attn.qkv wgrad"}
    assert found["attn.out"] == {"attn.out wgrad"}
    assert found["moe.act"] == {"moe.fc2 wgrad"}
    assert found["moe.dispatch"] <= {"moe.fc1 wgrad", "moe.permute recompute"}
    assert {"moe.router wgrad", "moe.shared.fc1 wgrad"} < found["mlp.norm"]
    assert found["mlp.norm"] & {"moe.permute recompute", "moe.dispatch recompute"}


def test_attention_waits_for_its_result_and_dense_activations_for_their_gradients() -> None:
    found = waits(backward("gpt3-175b", Layout(tp=8), "core_attn+mlp_act+layernorm"))
    assert found["attn.core"] == {"attn.core dgrad", "attn.out wgrad"}
    assert found["mlp.act"] == {"mlp.fc2 wgrad"}
    # With sequence parallelism the norm's output is gathered for the weight gradient.
    assert {"attn.qkv wgrad"} <= found["attn.norm"]


def test_the_gradient_waits_for_nothing_that_is_rebuilt() -> None:
    """The chain of input gradients is as long with rebuilt norms, activations and exchanges as without."""

    def chain(recompute: str) -> list[str]:
        graph = backward("internal-352b", Layout(sp=8, ep=8), recompute)
        last, names = len(graph.operators) - 1, list[str]()
        while True:
            names.append(graph.operators[last].name)
            before = [p for p in graph.producers(last) if graph.operators[p].pass_ == "dgrad"]
            if not before:
                return names
            last = max(before)

    assert chain("sar") == chain("none")


def test_shared_and_routed_experts_need_nothing_of_one_another() -> None:
    graph = backward("internal-352b", Layout(sp=8, ep=8), "none")
    (combine,) = (
        i for i, op in enumerate(graph.operators) if isinstance(op, CollectiveOp) and op.name == "moe.combine"
    )
    above = {combine}
    for src, dst in sorted(graph.dependencies, key=lambda edge: -edge[1]):
        if dst in above:
            above.add(src)
    assert not [i for i in above if graph.operators[i].name.startswith("moe.shared")]
    norm = next(i for i, op in enumerate(graph.operators) if (op.name, op.pass_) == ("mlp.norm", "dgrad"))
    needed = {graph.operators[i].name for i in graph.producers(norm)}
    assert needed == {"moe.router", "moe.shared.fc1"}


def test_the_chain_of_full_recompute_stays() -> None:
    graph = backward("internal-352b", Layout(sp=8, ep=8), "full")
    again = [i for i, op in enumerate(graph.operators) if op.pass_ == "recompute"]
    first = again[-1] + 1
    assert again[-1] in graph.producers(first)
