"""Models made from a few numbers: the plain GPT of many published scaling tables."""

from __future__ import annotations

from overlapsim.workload.model import Attention, Layer, Mlp, ModelSpec, check_num_layers, head_dim_of


def gpt(
    num_layers: int,
    hidden: int,
    num_heads: int,
    vocabulary: int,
    max_positions: int,
    *,
    ffn: int | None = None,
    dtype: str = "bf16",
    name: str = "gpt",
    source: str = "",
) -> ModelSpec:
    """A GPT-2/GPT-3 model: layernorm, biases everywhere, GELU, learned positions, logits tied to the embedding.

    Parameters
    ----------
    num_layers, hidden, num_heads, vocabulary, max_positions : sizes; the heads divide `hidden`
    ffn : inner width of the feed-forward block; None: four times `hidden`
    dtype, name, source : as in ``ModelSpec``

    Returns
    -------
    ModelSpec
        Its layers have 12 h^2 + 13 h parameters each (Narayanan et al., SC'21, equation 2).

    Raises
    ------
    WorkloadError
        If a size is out of range or the heads do not divide the hidden width.

    Examples
    --------
    >>> model = gpt(num_layers=96, hidden=12288, num_heads=96, vocabulary=51200, max_positions=2048)
    >>> model.layers[0].attention.head_dim
    128
    """
    check_num_layers(num_layers)
    head_dim = head_dim_of(hidden, num_heads)
    attention = Attention(num_heads, num_heads, head_dim, qkv_bias=True, out_bias=True)
    layer = Layer(attention, Mlp(4 * hidden if ffn is None else ffn, bias=True))
    return ModelSpec(
        name,
        hidden,
        (layer,) * num_layers,
        vocabulary,
        max_positions,
        positions="learned",
        norm="layernorm",
        tied_embeddings=True,
        dtype=dtype,
        source=source,
    )
