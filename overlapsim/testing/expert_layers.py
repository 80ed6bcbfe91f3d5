"""Layers with routed and shared experts over the ranks of a test machine: for strategies that arrange them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from overlapsim.strategy.pairing import side_by_side
from overlapsim.workload.build import GraphBuilder
from overlapsim.workload.layout import Layout
from overlapsim.workload.operators import OperatorGraph
from overlapsim.workload.presets import load_model
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.recompute import Recompute


@lru_cache(maxsize=4)
def expert_layers(ranks: int = 4, sequences: int = 2, length: int = 1024) -> Mapping[str, OperatorGraph]:
    """A layer of DeepSeekMoE-16B forward, backward with rebuilt activations, and both as an F&B pair.

    Parameters
    ----------
    ranks : over which experts are dealt
    sequences, length : of a micro-batch

    Examples
    --------
    >>> sorted(expert_layers())
    ['backward', 'forward', 'pair']
    """
    model, _ = load_model("deepseek-moe-16b")
    layer, layout = model.layers[-1], Layout(dp=ranks, ep=ranks)
    builder = GraphBuilder(model, layout, Recipe(), sequences, length, Recompute.parse("sar"))
    plain = GraphBuilder(model, layout, Recipe(), sequences, length)
    forward = builder.layer(layer, "forward")
    return {
        "forward": forward,
        "backward": builder.layer(layer, "backward"),
        "pair": side_by_side(forward, plain.layer(layer, "backward")),
    }
