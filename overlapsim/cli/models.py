"""`overlapsim models`: which models are known, what one is made of, its parameters and FLOP."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any, Final

import click
import msgspec

from overlapsim.cli.output import print_json
from overlapsim.units import format_rate
from overlapsim.workload.model import Attention, Layer, Mlp, ModelSpec, MoE, check_size
from overlapsim.workload.model_count import ParameterCount, TokenFlop, flop_per_token, parameters, step_flop_per_token
from overlapsim.workload.presets import list_presets, load_model, load_preset

DEFAULT_SEQ_LEN: Final = 8192
"""Sequence length of most published pre-training runs since 2023; shorter where a model ends before."""


@click.group("models")
def command() -> None:
    """List and show models: presets, model files, config.json files."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(as_json: bool) -> None:
    """One line a model that ships; a model file or config.json of your own works wherever a name does."""
    models = [load_preset(name) for name in list_presets()]
    if as_json:
        print_json([_summary(model, parameters(model)) for model in models])
        return
    width = max(len(model.name) for model in models)
    for model in models:
        count = parameters(model)
        click.echo(
            f"{model.name:{width}}  {_amount(count.total):>6} parameters, {_amount(count.active):>6} active,"
            f" {model.num_layers:3} layers, hidden {model.hidden:5}, {', '.join(_kinds(model))}"
        )


@command.command("show")
@click.argument("model")
@click.option(
    "--seq-len", type=int, help="Tokens of a sequence for FLOP; the model's longest, at most 8192, without it."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(model: str, seq_len: int | None, as_json: bool) -> None:
    """Show MODEL (a name, a model file, a config.json or its folder): layers, parameters, FLOP a token."""
    spec, findings = load_model(model)
    length = min(spec.max_positions, DEFAULT_SEQ_LEN) if seq_len is None else seq_len
    check_size("--seq-len", length)
    count, flop = parameters(spec), flop_per_token(spec, length)
    if as_json:
        print_json(
            {
                **_summary(spec, count),
                "source": spec.source,
                "spec": {
                    **{
                        key: value
                        for key, value in msgspec.to_builtins(spec).items()
                        if key not in ("layers", "source")
                    },
                    "layers": [{"count": times, **msgspec.to_builtins(layer)} for layer, times in spec.kinds.items()],
                },
                "parameters_by_operator": count.by_operator,
                "gemm_parameters_per_token": count.matrices,
                "mtp_parameters": count.mtp,
                "flop_per_token": _flop(spec, flop, length),
                "findings": findings,
            }
        )
        return
    for line in _lines(spec, count, flop, length):
        click.echo(line)
    for finding in findings:
        click.echo(f"finding: {finding.message} [{finding.code}]")


def _lines(model: ModelSpec, count: ParameterCount, flop: TokenFlop, seq_len: int) -> Iterator[str]:
    yield (
        f"{model.name}: {_amount(count.total)} parameters, {_amount(count.active)} active a token, "
        f"{model.num_layers} layers, hidden {model.hidden}, {model.dtype}"
    )
    for layer, times in model.kinds.items():
        yield f"  layers      {times} x {_layer_text(layer)}"
    if model.num_mtp_layers:
        extra = _amount(count.mtp)
        yield f"  mtp         {model.num_mtp_layers} more for training, {extra} parameters, in none of the sums"
    if model.diffusion is None:
        tied = "tied" if model.tied_embeddings else "not tied"
        positions = f"{model.positions} positions to {model.max_positions}"
        yield f"  vocabulary  {model.vocabulary}, embeddings {tied}, {positions}"
    else:
        patch, context = model.diffusion.patch_inputs, model.diffusion.context_tokens
        yield f"  diffusion   {patch} values a patch, {context} context tokens"
    for operator, number in count.by_operator.items():
        yield f"  parameters  {operator:16} {_amount(number):>7}  {number / count.total:6.1%}"
    values = _flop(model, flop, seq_len)
    yield (
        f"  FLOP/token  {_flop_text(values['step_masked_flop'])} a step, {_flop_text(values['forward_masked_flop'])} "
        f"forward, at {seq_len} tokens with attention under its mask"
    )
    yield (
        f"  FLOP/token  {_flop_text(values['step_full_flop'])} a step with attention in full, as Megatron-LM counts; "
        f"{_flop_text(values['step_full_recompute_flop'])} with full recompute"
    )
    yield textwrap.fill(model.source, 110, initial_indent="  source      ", subsequent_indent=" " * 14)


def _summary(model: ModelSpec, count: ParameterCount) -> dict[str, Any]:
    return {
        "name": model.name,
        "num_parameters": count.total,
        "num_active_parameters": count.active,
        "num_layers": model.num_layers,
        "hidden": model.hidden,
        "kinds": _kinds(model),
        "dtype": model.dtype,
    }


def _kinds(model: ModelSpec) -> list[str]:
    """What the layers are, each word once: ``gqa moe`` and the like."""
    return list(dict.fromkeys(f"{layer.attention.kind} {layer.kind}" for layer in model.kinds))


def _flop(model: ModelSpec, flop: TokenFlop, seq_len: int) -> dict[str, Any]:
    return {
        "seq_len": seq_len,
        "forward_masked_flop": flop.forward("masked"),
        "forward_full_flop": flop.forward("full"),
        "scores_masked_flop": flop.scores_masked,
        "scores_full_flop": flop.scores_full,
        "step_masked_flop": step_flop_per_token(model, seq_len, "masked"),
        "step_full_flop": step_flop_per_token(model, seq_len, "full"),
        "step_full_recompute_flop": step_flop_per_token(model, seq_len, "full", "full"),
        "by_operator_flop": flop.by_operator,
    }


def _layer_text(layer: Layer) -> str:
    mlp = layer.mlp
    text = _attention_text(layer.attention)
    if layer.cross is not None:
        text += f", cross-attention to the context ({layer.cross.num_heads} heads)"
    if isinstance(mlp, MoE):
        text += f", {mlp.num_experts} experts top-{mlp.top_k}, each {_mlp_text(mlp.expert)}"
        return text if mlp.shared is None else f"{text}, {mlp.num_shared_experts} shared ({_mlp_text(mlp.shared)})"
    return f"{text}, {_mlp_text(mlp)}"


def _attention_text(attention: Attention) -> str:
    kv = "" if attention.kind != "gqa" else f", {attention.num_kv_heads} for keys and values"
    window = "" if attention.window is None else f", window {attention.window}"
    shared = ", keys and values of the layer before" if attention.shared_kv else ""
    return f"{attention.kind} {attention.num_heads} heads of {attention.head_dim}{kv}{window}{shared}"


def _mlp_text(mlp: Mlp) -> str:
    return f"{'gated ' if mlp.gated else ''}{mlp.activation} ffn {mlp.ffn}"


def _amount(number: float) -> str:
    """Three significant digits of a count of parameters: 352 B, 126 M."""
    return format_rate(number, "").replace(" G", " B") if number else "0"


def _flop_text(flop: float) -> str:
    return format_rate(flop, "FLOP")
