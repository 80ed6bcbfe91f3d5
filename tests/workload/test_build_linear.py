from dataclasses import replace

import pytest

from overlapsim.workload.build import GraphBuilder
from overlapsim.workload.build_linear import TP_STREAM
from overlapsim.workload.layout import Layout
from overlapsim.workload.operators import CollectiveOp, GemmOp
from overlapsim.workload.presets import load_preset
from overlapsim.workload.recipe import RECIPES

MODEL = load_preset("korthikanti-22b")


def graph(*, overlap, split, which="backward", head=False, tp=8):
    recipe = replace(RECIPES["megatron-2022"], tp_overlap=overlap)
    builder = GraphBuilder(MODEL, Layout(tp=tp, sequence_parallel=split), recipe, 4, 2048)
    return builder.head(which) if head else builder.layer(MODEL.layers[0], which)


def positions(g, name, pass_, kind):
    return [i for i, op in enumerate(g.operators) if (op.name, op.pass_) == (name, pass_) and isinstance(op, kind)]


@pytest.mark.parametrize("name", ["attn.qkv", "mlp.fc1"])
def test_gather_beside_input_gradient_and_sum_beside_weight_gradient(name):
    g = graph(overlap=True, split=True)
    (gathered,), (summed,) = positions(g, name, "wgrad", CollectiveOp), positions(g, name, "dgrad", CollectiveOp)
    (dgrad,), (wgrad,) = positions(g, name, "dgrad", GemmOp), positions(g, name, "wgrad", GemmOp)
    assert {g.stream_of(gathered), g.stream_of(summed)} == {TP_STREAM}
    assert {g.stream_of(dgrad), g.stream_of(wgrad)} == {"compute"}
    # The input gradient needs no gathered input, the weight gradient no sum; each collective what it moves.
    assert gathered not in g.producers(dgrad)
    assert gathered in g.producers(wgrad)
    assert summed not in g.producers(wgrad)
    assert dgrad < wgrad
    assert g.producers(summed) == (dgrad,)
    norm = next(i for i in range(len(g.operators)) if summed in g.producers(i))
    assert g.operators[norm].name == name.split(".")[0] + ".norm"


def test_whole_sequences_overlap_the_all_reduce_alone():
    g = graph(overlap=True, split=False)
    kinds = [op.kind for op in g.operators if isinstance(op, CollectiveOp)]
    assert kinds == ["all_reduce", "all_reduce"]
    assert [g.stream_of(i) for i, op in enumerate(g.operators) if isinstance(op, CollectiveOp)] == [TP_STREAM] * 2


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("which", ["backward", "input_grad", "weight_grad"])
def test_overlap_moves_operators_and_adds_none(which, split):
    plain, beside = graph(overlap=False, split=split, which=which), graph(overlap=True, split=split, which=which)
    assert sorted(map(repr, plain.operators)) == sorted(map(repr, beside.operators))
    assert set(plain.streams) == {"compute"}
    # Passes that stand alone have nothing to run beside.
    assert (TP_STREAM in beside.streams) == (which == "backward")


def test_one_rank_moves_nothing():
    assert graph(overlap=True, split=True, tp=1) == graph(overlap=False, split=True, tp=1)


@pytest.mark.parametrize(("split", "kinds"), [(True, ["all_gather", "reduce_scatter"]), (False, ["all_reduce"])])
def test_logits_gather_their_input_again(split, kinds):
    g = graph(overlap=True, split=split, head=True)
    assert [op.kind for op in g.operators if isinstance(op, CollectiveOp)] == kinds
