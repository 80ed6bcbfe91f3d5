"""Memory that kernels for experts hold for themselves, whether tokens come or not."""

from __future__ import annotations

from typing import Final

from overlapsim.units import dtype_bytes
from overlapsim.workload.layout import Layout
from overlapsim.workload.model import ModelSpec, MoE
from overlapsim.workload.recipe import Recipe

CONTROL_BYTES: Final = 16
"""What a low-latency message carries beside its row (hwprofiles/SOURCES.md, DEEPEP)."""


def dispatch_buffer_bytes(model: ModelSpec, layout: Layout, recipe: Recipe, tokens: int) -> float:
    """Bytes of a GPU's buffers for low-latency dispatch; 0 for other dispatchers.

    Two sets, so that two exchanges may be under way, each with a row to send and one to receive for every token of a
    rank and every expert: ``2 x 2 x experts x tokens x (2 hidden + 16)`` (the size that DeepEP asks for). What the
    other kernels hold does not grow with tokens and is left out.

    Parameters
    ----------
    tokens : most of one rank

    Examples
    --------
    >>> from overlapsim.workload.presets import load_preset
    >>> recipe = Recipe(dispatcher="deepep_low_latency")
    >>> round(dispatch_buffer_bytes(load_preset("deepseek-v3"), Layout(ep=8, dp=8), recipe, 128) / 2**30, 2)
    1.75
    """
    if recipe.dispatcher != "deepep_low_latency" or layout.ep == 1:
        return 0.0
    experts = max((layer.mlp.num_experts for layer in model.kinds if isinstance(layer.mlp, MoE)), default=0)
    return 4.0 * experts * tokens * (model.hidden * dtype_bytes(model.dtype) + CONTROL_BYTES)
