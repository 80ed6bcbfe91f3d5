"""Reads torchtitan's configs, TOML or Python, without running them: settings with their lines, and what they mean."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

from overlapsim.emit.base import Reading
from overlapsim.emit.rules import Version, spelt
from overlapsim.emit.torch_schedules import NEUTRAL
from overlapsim.emit.torchtitan_flags import FLAGS, LAST_TOML
from overlapsim.emit.torchtitan_models import preset_of, preset_of_function
from overlapsim.errors import UsageError
from overlapsim.workload.layout import Layout
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.presets import load_preset

SECTIONS: Final[Mapping[str, str]] = {
    "TrainingConfig": "training",
    "ParallelismConfig": "parallelism",
    "CompileConfig": "compile",
}
"""Section of each class of the Python dialect."""
MANY_STAGES: Final = frozenset({"interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev"})
"""Schedules with several stages a rank."""
_POLICIES: Final = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}
_DEFAULTS: Final[Mapping[str, Any]] = {
    "local_batch": 8, "global_batch": -1, "seq_len": 2048, "no_graphs": False, "replicate": 1, "shard": -1,
    "reshard": "default", "tp": 1, "sequence_parallel": True, "pp": 1, "schedule": "1F1B", "schedule_csv": "",
    "micro_batch": 1, "layers_per_stage": None, "first_less": 1, "last_less": 1, "parts": None, "pair_overlap": True,
    "cp": 1, "cp_rotate": "allgather", "ep": 1, "etp": 1, "async_tp": False, "compile": False,
    "compiled": ["model", "loss"], "recompute": "selective", "recompute_option": "2", "fp8_recipe": None,
    "converters": [], "model": "llama3", "flavor": "debugmodel",
}  # fmt: skip
"""What torchtitan takes where a config says nothing (0.2.2; 0.3.0 keeps these)."""


@dataclass(frozen=True)
class Said:
    """One setting of a config, its value as written, and its line from 1."""

    value: Any
    line: int


@dataclass(frozen=True)
class TitanConfig:
    """A config.

    Attributes
    ----------
    said : settings by ``section.key``
    version : of the rules that spell them
    preset : of the model, where torchtitan ships it
    """

    said: Mapping[str, Said]
    version: Version
    preset: str | None

    def get(self, name: str) -> Any:
        """Value of a setting by its neutral name, the default where nothing is said."""
        spelling = FLAGS[name].spelt(self.version)
        return self.said[spelling].value if spelling is not None and spelling in self.said else _DEFAULTS[name]

    def whole(self, name: str) -> int:
        """Value of a degree or count; its default where what is said is no whole number."""
        value = self.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else int(_DEFAULTS[name] or 0)

    def line(self, name: str) -> int | None:
        """Line of a setting, None where nothing is said."""
        spelling = FLAGS[name].spelt(self.version)
        return self.said[spelling].line if spelling is not None and spelling in self.said else None

    def names(self, name: str) -> bool:
        """Whether anything is said of a setting."""
        return self.line(name) is not None

    @property
    def neutral(self) -> Mapping[str, str]:
        """Neutral names by spelling."""
        return spelt(FLAGS, self.version)

    @property
    def model(self) -> ModelSpec | None:
        """The model, where torchtitan ships it and it is among the presets."""
        return None if self.preset is None else load_preset(self.preset)

    @property
    def num_stages(self) -> int | None:
        """Stages of the pipeline over all ranks; None where the number of layers is not known."""
        pp = self.whole("pp")
        if pp == 1:
            return 1
        if isinstance(self.get("parts"), list):
            return len(self.get("parts"))
        per_stage = self.get("layers_per_stage")
        if not isinstance(per_stage, int) or per_stage < 1:
            return pp * (2 if str(self.get("schedule")).lower() in MANY_STAGES else 1)
        if self.model is None:
            return None
        return ceil((self.model.num_layers + self.whole("first_less") + self.whole("last_less")) / per_stage)


def read_toml(text: str, version: Version) -> TitanConfig:
    """Settings of a TOML file.

    Raises
    ------
    UsageError
        If it is no TOML.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"the config is no TOML ({error}); torchtitan up to {LAST_TOML} reads TOML") from None
    lines = dict(_toml_lines(text))
    flat = {key: Said(value, lines.get(key, 1)) for key, value in _flat(content, "")}
    name, flavor = (flat.get(f"model.{key}", Said(_DEFAULTS["model" if key == "name" else "flavor"], 1)).value
                    for key in ("name", "flavor"))  # fmt: skip
    return TitanConfig(flat, min(version, LAST_TOML), preset_of(str(name), str(flavor)))


def read_python(text: str, version: Version) -> TitanConfig:
    """Settings that a Python config names by constants; nothing is run.

    Raises
    ------
    UsageError
        If it is no Python.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UsageError(f"the config is no Python ({error.msg}, line {error.lineno}); expected a module") from None
    said: dict[str, Said] = {}
    preset = None
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("config_registry"):
            preset = next((p for alias in node.names if (p := preset_of_function(alias.name))), preset)
        elif isinstance(node, ast.Call):
            said |= _of_call(node)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            said |= _of_assignment(node.targets[0], node.value)
        elif isinstance(node, ast.keyword) and node.arg == "activation_checkpoint":
            said |= _policy(node.value)
    return TitanConfig(said, version, preset)


def reading(config: TitanConfig, world_size: int | None) -> Reading:
    """What a config means, in neutral terms.

    Raises
    ------
    LayoutError
        If its degrees make no layout.
    """
    replicate, shard = config.whole("replicate"), config.whole("shard")
    inner = {name: config.whole(name) for name in ("tp", "cp", "pp")}
    if shard == -1:
        rest = replicate * inner["tp"] * inner["cp"] * inner["pp"]
        shard = max(1, (world_size or 1) // rest)
    ep = config.whole("ep")
    stages = config.num_stages
    sharded = shard > 1 or inner["cp"] > 1
    gathered = config.get("reshard") == "always" or (config.get("reshard") == "default" and inner["pp"] == 1)
    layout = Layout(
        **inner,
        dp=replicate * shard,
        hsdp=replicate if sharded else 1,
        zero=0 if not sharded else 3 if gathered else 2,
        ep=ep,
        etp=config.whole("etp") if ep > 1 else 0,
        vpp=max(1, (stages or inner["pp"]) // inner["pp"]),
        cp_kind="ring" if config.version > LAST_TOML or config.get("cp_rotate") == "alltoall" else "allgather",
        sequence_parallel=config.version <= LAST_TOML or bool(config.get("sequence_parallel")),
    )
    local = config.whole("local_batch")
    wanted = config.whole("global_batch")
    return Reading(
        layout,
        world_size=layout.world_size if config.whole("shard") != -1 else world_size,
        micro_batch=config.whole("micro_batch") if layout.pp > 1 else local,
        global_batch=local * layout.dp if wanted == -1 else wanted,
        seq_len=config.whole("seq_len"),
        model=config.model,
        settings=dict(_settings(config, layout)),
    )


def _settings(config: TitanConfig, layout: Layout) -> Iterator[tuple[str, Any]]:
    """Other settings by the names of `StepSettings`."""
    if layout.dp * layout.cp > 1:
        yield "dp_overlap", "both"
    mode = str(config.get("recompute"))
    if mode in ("none", "full", "selective"):
        yield "recompute", mode
    if layout.pp > 1 and not config.get("schedule_csv"):
        name = NEUTRAL.get(str(config.get("schedule")).lower())
        if name is not None:
            yield "schedule", name


def _flat(content: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _toml_lines(text: str) -> Iterator[tuple[str, int]]:
    """Line of each key; keys within values of several lines do not matter, as no setting has such a name."""
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if head := re.match(r"\s*\[\s*([\w.\"-]+)\s*\]", line):
            section = head[1].replace('"', "") + "."
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            yield section + key[1], number


def _of_call(node: ast.Call) -> dict[str, Said]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    section = SECTIONS.get(str(name))
    if section is None:
        return {}
    return {f"{section}.{kw.arg}": Said(_constant(kw.value), kw.lineno) for kw in node.keywords if kw.arg}


def _of_assignment(target: ast.expr, value: ast.expr) -> dict[str, Said]:
    if not isinstance(target, ast.Attribute):
        return {}
    if target.attr == "activation_checkpoint":
        return _policy(value)
    if isinstance(target.value, ast.Attribute) and target.value.attr in SECTIONS.values():
        return {f"{target.value.attr}.{target.attr}": Said(_constant(value), target.lineno)}
    return {}


def _policy(value: ast.expr) -> dict[str, Said]:
    """Policy of recomputation: None, or a class of policies called."""
    found = next((_POLICIES[n.id] for n in ast.walk(value) if isinstance(n, ast.Name) and n.id in _POLICIES), None)
    if found is None and not (isinstance(value, ast.Constant) and value.value is None):
        return {}
    return {"activation_checkpoint.mode": Said(found or "none", value.lineno)}


def _constant(node: ast.expr) -> Any:
    """Value of a literal; its source where it is none."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
