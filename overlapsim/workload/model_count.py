"""Parameters and FLOP of a model, counted from its weights; attention's scores under the mask and in full."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeVar, get_args

from overlapsim.workload.model import Attention, Layer, ModelSpec, check_choice, check_size
from overlapsim.workload.weights import Matrix, Rows, Weight, layer_weights, model_weights, mtp_weights

Number = TypeVar("Number", int, float)
Scores = Literal["masked", "full"]
Recompute = Literal["none", "selective", "full"]
BACKWARD_OVER_FORWARD: Final = 2.0
"""Each forward product has two in the backward pass: by its inputs and by its weights (or keys and values)."""


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model without vocabulary padding.

    Attributes
    ----------
    total : all, without those of multi-token prediction, as published totals count
    active : that a token goes through: `top_k` experts instead of all; tables are counted whole
    matrices : of `active`, those that a GEMM multiplies for every token: no tables, norms or biases
    mtp : of the layers of multi-token prediction; they are in none of the others
    by_operator : `total`, by operator
    """

    total: int
    active: int
    matrices: int
    mtp: int
    by_operator: Mapping[str, int]


@dataclass(frozen=True)
class TokenFlop:
    """FLOP of a token, a multiply-add counted as two, averaged over the sequence.

    Attributes
    ----------
    by_operator : forward FLOP by operator, without attention's scores
    scores_masked, scores_full : forward FLOP of ``attn.core`` (scores and their sum of values): for the tokens that the
        mask lets through, and for all of them; the first is half of the second for causal attention
    """

    by_operator: Mapping[str, float]
    scores_masked: float
    scores_full: float

    def scores(self, scores: Scores) -> float:
        """Forward FLOP of attention's scores, under the mask or in full.

        Raises
        ------
        WorkloadError
            If `scores` is neither ``masked`` nor ``full``.
        """
        check_choice("scores", scores, get_args(Scores))
        return self.scores_masked if scores == "masked" else self.scores_full

    def forward(self, scores: Scores = "masked") -> float:
        """FLOP of the forward pass."""
        return sum(self.by_operator.values()) + self.scores(scores)


def parameters(model: ModelSpec) -> ParameterCount:
    """Count the parameters of `model`.

    Examples
    --------
    >>> from overlapsim.workload.families import gpt
    >>> count = parameters(gpt(num_layers=12, hidden=768, num_heads=12, vocabulary=50257, max_positions=1024))
    >>> count.total, count.active == count.total
    (124439808, True)
    """
    by_operator: dict[str, int] = {}
    active = matrices = 0
    for weight, times in _all_weights(model):
        by_operator[weight.operator] = by_operator.get(weight.operator, 0) + times * weight.parameters
        active += times * weight.active_parameters
        if isinstance(weight, Matrix) and weight.rows == "token":
            matrices += times * weight.used * weight.inputs * weight.outputs
    mtp = model.num_mtp_layers * sum(weight.parameters for weight in mtp_weights(model))
    return ParameterCount(sum(by_operator.values()), active, matrices, mtp, by_operator)


def layer_parameters(model: ModelSpec, layer: Layer) -> dict[str, int]:
    """Parameters of one layer, by operator."""
    return _by_operator(layer_weights(model, layer), lambda weight: weight.parameters)


def layer_flop_per_token(model: ModelSpec, layer: Layer, seq_len: int) -> TokenFlop:
    """Forward FLOP of a token in one layer.

    Parameters
    ----------
    model, layer : the model and one of its layers
    seq_len : tokens of the sequence, to which attention's scores are proportional

    Raises
    ------
    WorkloadError
        If `seq_len` is not a size.
    """
    check_size("seq_len", seq_len)
    weights = layer_weights(model, layer)
    masked, full = (_scores(layer.attention, _mean_seen(layer.attention, seq_len, mask)) for mask in (True, False))
    cross = 0.0
    if layer.cross is not None and model.diffusion is not None:
        cross = _scores(layer.cross, model.diffusion.context_tokens)
    return TokenFlop(_by_operator(weights, _per_token(model, seq_len)), masked + cross, full + cross)


def flop_per_token(model: ModelSpec, seq_len: int, *, mtp: bool = False) -> TokenFlop:
    """Forward FLOP of a token in the whole model: layers, logits, and a diffusion model's patches and context.

    Parameters
    ----------
    model : the model, unpadded
    seq_len : tokens of a sequence; it may exceed the model's `max_positions`
    mtp : whether to count the layers of multi-token prediction, which published figures leave out

    Raises
    ------
    WorkloadError
        If `seq_len` is not a size.

    Examples
    --------
    A GPT's forward pass takes 24 B s l h^2 (1 + s/(6h) + V/(12 l h)) FLOP (Narayanan et al., SC'21):

    >>> from overlapsim.workload.families import gpt
    >>> model = gpt(num_layers=2, hidden=128, num_heads=2, vocabulary=1000, max_positions=64)
    >>> flop_per_token(model, 64).forward("full") == 24 * 2 * 128**2 + 4 * 2 * 128 * 64 + 2 * 128 * 1000
    True
    """
    check_size("seq_len", seq_len)
    per_token = _per_token(model, seq_len)
    by_operator = _by_operator(model_weights(model), per_token)
    masked = full = 0.0
    for layer, times in model.kinds.items():
        count = layer_flop_per_token(model, layer, seq_len)
        _add(by_operator, count.by_operator, times)
        masked, full = masked + times * count.scores_masked, full + times * count.scores_full
    if mtp and model.num_mtp_layers:
        last = layer_flop_per_token(model, model.layers[-1], seq_len)
        _add(by_operator, _by_operator(mtp_weights(model), per_token), model.num_mtp_layers)
        masked += model.num_mtp_layers * last.scores_masked
        full += model.num_mtp_layers * last.scores_full
    return TokenFlop(by_operator, masked, full)


def step_flop_per_token(
    model: ModelSpec, seq_len: int, scores: Scores = "masked", recompute: Recompute = "none", *, mtp: bool = False
) -> float:
    """FLOP of a token in a training step, forward and backward.

    Parameters
    ----------
    model, seq_len, mtp : as in ``flop_per_token``
    scores : attention's scores under the mask (MegaScale-MoE and DeepSeek count so) or in full (Megatron-LM, MegaScale)
    recompute : what runs a second time: nothing (model FLOP, as in MFU), attention's scores (selective), or every layer
        (full). With recompute the result is hardware FLOP, as in HFU

    Raises
    ------
    WorkloadError
        If an argument is not one of its choices.
    """
    check_choice("recompute", recompute, get_args(Recompute))
    count = flop_per_token(model, seq_len, mtp=mtp)
    step = (1.0 + BACKWARD_OVER_FORWARD) * count.forward(scores)
    if recompute == "selective":
        return step + count.scores(scores)
    if recompute == "full":
        outside = ("embed", "logits")
        layers = sum(flop for operator, flop in count.by_operator.items() if operator not in outside)
        return step + layers + count.scores(scores)
    return step


def _all_weights(model: ModelSpec) -> Iterable[tuple[Weight, int]]:
    yield from ((weight, 1) for weight in model_weights(model))
    for layer, times in model.kinds.items():
        yield from ((weight, times) for weight in layer_weights(model, layer))


def _mean_seen(attention: Attention, seq_len: int, masked: bool) -> float:
    """Tokens that a token sees on average: s / 2 under a causal mask, as published FLOP counts take it."""
    window = min(attention.window or seq_len, seq_len)
    if not masked:
        return seq_len
    return window - window**2 / (2 * seq_len) if attention.causal else window


def _scores(attention: Attention, seen: float) -> float:
    return 2.0 * attention.num_heads * (attention.head_dim + attention.v_dim) * seen


def _per_token(model: ModelSpec, seq_len: int) -> Callable[[Weight], float]:
    context = 0 if model.diffusion is None else model.diffusion.context_tokens
    rows: Mapping[Rows, float] = {"token": 1.0, "context": context / seq_len, "sequence": 1.0 / seq_len}
    return lambda weight: weight.flop_per_row * (rows[weight.rows] if isinstance(weight, Matrix) else 0.0)


def _by_operator(weights: Iterable[Weight], amount: Callable[[Weight], Number]) -> dict[str, Number]:
    amounts: dict[str, Number] = {}
    for weight in weights:
        amounts[weight.operator] = amounts.get(weight.operator, 0) + amount(weight)
    return amounts


def _add(into: dict[str, float], amounts: Mapping[str, float], times: int) -> None:
    for operator, amount in amounts.items():
        into[operator] = into.get(operator, 0.0) + times * amount
