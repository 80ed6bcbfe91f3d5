"""Model files of our own (YAML): the presets and any model that no ``config.json`` describes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Final, TypeVar

from overlapsim.errors import WorkloadError
from overlapsim.strict_yaml import YamlFaultError, parse
from overlapsim.workload.families import gpt
from overlapsim.workload.model import (
    Attention,
    Diffusion,
    LatentAttention,
    Layer,
    Mlp,
    ModelSpec,
    MoE,
    check_num_layers,
    check_size,
    head_dim_of,
    shown,
)

Spec = TypeVar("Spec")
TOP_KEYS: Final = ("kind", "name", "source", "family")
GPT_KEYS: Final = ("num_layers", "hidden", "num_heads", "vocabulary", "max_positions", "ffn", "dtype")
SECTIONS: Final = ("attention", "mlp", "moe", "cross", "layers")
RUN_KEYS: Final = ("count", "block", "windows", "shared_kv", "modulation")
NESTED: Final = {"latent": LatentAttention, "expert": Mlp, "shared": Mlp}


def parse_model(text: str, name: str) -> ModelSpec:
    """Build a model from the text of a model file (docs/models.md says what it holds).

    Parameters
    ----------
    text : YAML
    name : file name or preset, for messages, and the model's name where the file has none

    Raises
    ------
    WorkloadError
        If the text is not YAML, misses a key, has an unknown one, or describes no valid model. One error, which names
        the file, the key and what was expected.

    Examples
    --------
    >>> text = "{kind: model, family: gpt, num_layers: 2, hidden: 64, num_heads: 4, vocabulary: 99, max_positions: 8}"
    >>> parse_model(text, "tiny").num_layers
    2
    """
    try:
        data = parse(text)
    except YamlFaultError as fault:
        raise WorkloadError(f"model {name} is not YAML: {fault}; expected a model file as in docs/models.md") from None
    if not isinstance(data, dict) or data.get("kind") != "model":
        raise WorkloadError(
            f"model {name} is {'empty' if data is None else 'not a model file'}; expected a mapping with kind: model"
        )
    try:
        return _model(data, name)
    except WorkloadError as error:
        raise WorkloadError(f"model {name}: {error}") from None


def _model(data: Mapping[str, Any], name: str) -> ModelSpec:
    given = {key: value for key, value in data.items() if key not in TOP_KEYS}
    title, source = _text(data, "name", name), _text(data, "source", name)
    if "family" in data:
        if data["family"] != "gpt":
            raise WorkloadError(f"family is {shown(data['family'])}; expected gpt, or sections attention, mlp, layers")
        _refuse_unknown(given, GPT_KEYS, "")
        _require(given, GPT_KEYS[:5], "")
        return gpt(**given, name=title, source=source)
    own = [field.name for field in fields(ModelSpec) if field.name not in ("name", "layers", "source")]
    _refuse_unknown(given, (*own, *SECTIONS), "")
    _require(given, ("hidden", "vocabulary", "max_positions", "attention", "layers"), "")
    values = {key: value for key, value in given.items() if key in own}
    if "diffusion" in values:
        values["diffusion"] = _build(Diffusion, values["diffusion"], "diffusion")
    check_size("hidden", values["hidden"])
    return ModelSpec(name=title, layers=_layers(given, values["hidden"]), source=source, **values)


def _layers(given: Mapping[str, Any], hidden: int) -> tuple[Layer, ...]:
    blocks: dict[str, Mlp | MoE] = {}
    if "mlp" in given:
        blocks["dense"] = _build(Mlp, given["mlp"], "mlp")
    if "moe" in given:
        blocks["moe"] = _build(MoE, given["moe"], "moe")
    cross = _attention(given["cross"], hidden, "cross", {"causal": False}) if "cross" in given else None
    runs = given["layers"]
    if not isinstance(runs, list) or not runs:
        raise WorkloadError(f"layers is {shown(runs)}; expected a list of runs such as [count: 32, block: dense]")
    layers: list[Layer] = []
    for number, run in enumerate(runs):
        where = f"layers[{number}]"
        if not isinstance(run, dict):
            raise WorkloadError(f"{where} is {shown(run)}; expected a mapping with count and block")
        _refuse_unknown(run, RUN_KEYS, where + ".")
        _require(run, ("count",), where + ".")
        check_num_layers(run["count"], where + ".count")
        block = run.get("block", "dense")
        if not isinstance(block, str) or block not in blocks:
            raise WorkloadError(f"{where}.block is {shown(block)}; expected one of {', '.join(blocks) or 'a section'}")
        windows, shares = _cycle(run, "windows", where), _cycle(run, "shared_kv", where)
        for index in range(run["count"]):
            over = {"window": windows[index % len(windows)], "shared_kv": shares[index % len(shares)]}
            given_over = {key: value for key, value in over.items() if value is not None}
            attention = _attention(given["attention"], hidden, "attention", given_over)
            layers.append(Layer(attention, blocks[block], cross, run.get("modulation", 0)))
    return tuple(layers)


def _cycle(run: Mapping[str, Any], key: str, where: str) -> list[Any]:
    """Values that the run's layers take in turn."""
    values = run.get(key, [None])
    if not isinstance(values, list) or not values:
        raise WorkloadError(f"{where}.{key} is {shown(values)}; expected a list that the layers take in turn")
    return values


def _attention(entry: Any, hidden: int, where: str, over: Mapping[str, Any]) -> Attention:
    if not isinstance(entry, dict):
        raise WorkloadError(f"{where} is {shown(entry)}; expected a section of keys")
    _require(entry, ("num_heads",), where + ".")
    heads = entry["num_heads"]
    defaults = {"num_kv_heads": heads}
    if "head_dim" not in entry:
        defaults["head_dim"] = head_dim_of(hidden, heads)
    return _build(Attention, {**defaults, **entry, **over}, where)


def _build(kind: type[Spec], entry: Any, where: str) -> Spec:
    """One of the model's parts from its section, whose keys are the part's fields."""
    if not isinstance(entry, dict):
        raise WorkloadError(f"{where} is {shown(entry)}; expected a section of keys")
    known = fields(kind)  # type: ignore[arg-type]
    _refuse_unknown(entry, [field.name for field in known], where + ".")
    _require(entry, [field.name for field in known if field.default is MISSING], where + ".")
    values = {
        key: _build(NESTED[key], value, f"{where}.{key}") if key in NESTED and value is not None else value
        for key, value in entry.items()
    }
    try:
        return kind(**values)
    except WorkloadError as error:
        raise WorkloadError(f"{where}: {error}") from None


def _text(data: Mapping[str, Any], key: str, default: str) -> str:
    value = data.get(key, default)
    if not isinstance(value, str) or not value.strip():
        raise WorkloadError(f"{key} is {shown(value)}; expected a text")
    return value.strip()


def _require(data: Mapping[str, Any], keys: Any, where: str) -> None:
    missing = [where + key for key in keys if key not in data]
    if missing:
        raise WorkloadError(f"missing {'keys' if len(missing) > 1 else 'key'} {', '.join(missing)}")


def _refuse_unknown(data: Mapping[Any, Any], allowed: Any, where: str) -> None:
    for key in data:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(allowed)}"
            raise WorkloadError(f"unknown key {where}{key}; {hint}")
