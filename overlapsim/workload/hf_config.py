"""A model from the ``config.json`` that Hugging Face models are published with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from overlapsim.errors import WorkloadError
from overlapsim.plan import Finding
from overlapsim.workload.hf_families import FAMILIES
from overlapsim.workload.hf_fields import Fields
from overlapsim.workload.model import ModelSpec, NormKind, Positions, shown

DTYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bf16": "bf16", "fp16": "fp16"}
TIED_DEFAULT: Final = frozenset({"gpt2"})
LAYERNORM: Final = frozenset({"gpt2", "phimoe"})
MAX_CHARACTERS: Final = 8 * 2**20
"""Published configurations take a few kilobytes; long per-layer lists a few hundred."""


def parse_config(text: str, label: str, name: str | None = None) -> tuple[ModelSpec, tuple[Finding, ...]]:
    """Build a model from the text of a ``config.json``.

    Parameters
    ----------
    text : JSON object with a `model_type` of ``FAMILIES``; the language part of a multi-modal one (`text_config`)
    label : file name for messages
    name : name of the model; None: its `model_type`

    Returns
    -------
    model : ModelSpec
    findings : tuple of Finding
        ``config_field_ignored`` for each field that may matter and is not read, ``dtype_assumed``,
        ``kv_heads_assumed``, ``quantized_weights``, ``text_part_only``.

    Raises
    ------
    WorkloadError
        One, which names the file, the field, the value and what was expected.

    Examples
    --------
    >>> text = '{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,'
    >>> model, findings = parse_config(text + ' "vocab_size": 50257}', "config.json")
    >>> model.num_layers, [finding.code for finding in findings]
    (12, ['dtype_assumed'])
    """
    data = _parse(text, label)
    try:
        return _model(data, name)
    except WorkloadError as error:
        raise WorkloadError(f"configuration {label}: {error}") from None


def _model(data: Mapping[str, Any], name: str | None) -> tuple[ModelSpec, tuple[Finding, ...]]:
    fields = Fields(data)
    part = fields.raw("text_config")
    if isinstance(part, dict) and data.get("model_type") not in FAMILIES:
        fields = Fields(part)
        fields.assume("text_part_only", "the language part (text_config) of a multi-modal model is read, nothing else")
    model_type = fields.word("model_type", default="")
    if model_type not in FAMILIES:
        raise WorkloadError(
            f"model_type is {shown(model_type) if model_type else 'missing'}; expected one of {', '.join(FAMILIES)}; "
            "describe another model in a model file (docs/models.md)"
        )
    layers = FAMILIES[model_type](fields)
    hidden = fields.size("hidden_size", "n_embd")
    vocabulary = fields.size("vocab_size")
    max_positions = fields.size("max_position_embeddings", "n_positions", "n_ctx")
    positions: Positions = "learned" if model_type == "gpt2" else "rotary"
    norm: NormKind = "layernorm" if model_type in LAYERNORM else "rmsnorm"
    tied = fields.flag("tie_word_embeddings", default=model_type in TIED_DEFAULT)
    logits_bias = fields.flag("lm_head_bias", default=False)
    num_mtp_layers = fields.size("num_nextn_predict_layers", default=0, low=0)
    dtype = _dtype(fields)
    if fields.raw("quantization_config") is not None:
        fields.assume("quantized_weights", f"the published weights are quantised; training in {dtype} is described")
    fields.leftovers()
    model = ModelSpec(
        name or model_type,
        hidden,
        layers,
        vocabulary,
        max_positions,
        positions,
        norm,
        tied_embeddings=tied,
        logits_bias=logits_bias,
        num_mtp_layers=num_mtp_layers,
        dtype=dtype,
        source="a config.json",
    )
    return model, tuple(fields.findings)


def _dtype(fields: Fields) -> str:
    word = fields.word("dtype", "torch_dtype", default="")
    if not word:
        fields.assume("dtype_assumed", "the configuration names no dtype; training in bf16 is taken")
        return "bf16"
    if word not in DTYPES:
        raise WorkloadError(f"dtype is {shown(word)}; expected one of {', '.join(DTYPES)}")
    return DTYPES[word]


def _parse(text: str, label: str) -> Mapping[str, Any]:
    if len(text) > MAX_CHARACTERS:
        raise WorkloadError(f"configuration {label} has {len(text)} characters; at most {MAX_CHARACTERS} are read")
    if not text.strip():
        raise WorkloadError(f"configuration {label} is empty; expected the JSON object of a config.json")
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise WorkloadError(
            f"configuration {label} is not JSON: line {error.lineno}: {error.msg}; expected the object of a config.json"
        ) from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise WorkloadError(
            f"configuration {label} is not JSON that we read: {reason}; expected the object of a config.json"
        ) from None
    if not isinstance(data, dict):
        raise WorkloadError(f"configuration {label} is {_kind(data)}; expected the JSON object of a config.json")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"field {key!r} appears twice")
        found[key] = value
    return found


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def _kind(data: object) -> str:
    return {list: "a list", str: "a text", bool: "true or false", type(None): "null"}.get(type(data), "a number")
