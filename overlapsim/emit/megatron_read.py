"""Megatron's arguments as text and back: argument lists, launch scripts and the YAML of its test recipes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from overlapsim.emit.base import Reading
from overlapsim.emit.megatron_layout import GRADIENT_BYTES, SHARDING
from overlapsim.emit.megatron_options import megatron_options
from overlapsim.errors import LayoutError
from overlapsim.workload.layout import Layout

_ASSIGNMENT: Final = re.compile(r"^(?:#\s*env\s+|export\s+|-e\s+|--env\s+)?([A-Za-z_]\w*)\s*=\s*(\S*)$")
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)")
_YAML: Final = re.compile(r"^\s*(--[\w-]+|[A-Z][A-Z0-9_]+)\s*:\s*(.*?)\s*$")
_WORLD: Final = re.compile(r"^#?\s*world_size\s*[=:]\s*(\d+)", re.IGNORECASE)
_WORLD_NAMES: Final = ("WORLD_SIZE", "world_size")
_NODES: Final = ("--nnodes",)
_PER_NODE: Final = ("--nproc_per_node", "--nproc-per-node")


@dataclass(frozen=True)
class Argument:
    """One flag with its values, and the line it stands on."""

    flag: str
    values: tuple[str, ...]
    line: int

    @property
    def value(self) -> str:
        """The first value, or nothing."""
        return self.values[0] if self.values else ""


@dataclass(frozen=True)
class Script:
    """What a file says.

    Attributes
    ----------
    arguments : in the order of the file; of a flag given twice the last one counts
    environment : variables, with their lines; None where one is unset
    world_size : ranks, where the file names them
    """

    arguments: tuple[Argument, ...]
    environment: Mapping[str, tuple[str | None, int]] = field(default_factory=dict)
    world_size: int | None = None

    @property
    def by_flag(self) -> dict[str, Argument]:
        """The argument that counts, by flag."""
        return {argument.flag: argument for argument in self.arguments}

    def has(self, flag: str) -> bool:
        """Whether a flag is there."""
        return flag in self.by_flag

    def number(self, flag: str, default: int | None = None) -> int | None:
        """Value of a flag as a whole number; `default` where it is not there or is none."""
        argument = self.by_flag.get(flag)
        return int(argument.value) if argument is not None and argument.value.isdecimal() else default

    def line(self, *flags: str) -> int | None:
        """Line of the first of some flags that is there."""
        return next((self.by_flag[flag].line for flag in flags if flag in self.by_flag), None)


def read_script(text: str) -> Script:
    r"""Read flags and environment; shell variables that the file sets are filled in.

    Examples
    --------
    >>> script = read_script("export CUDA_DEVICE_MAX_CONNECTIONS=1\nTP=8\n--tensor-model-parallel-size $TP --bf16")
    >>> script.number("--tensor-model-parallel-size"), script.has("--bf16"), script.environment
    (8, True, {'CUDA_DEVICE_MAX_CONNECTIONS': ('1', 1), 'TP': ('8', 2)})
    """
    variables: dict[str, str] = {}
    environment: dict[str, tuple[str | None, int]] = {}
    found: list[tuple[str, list[str], int]] = []
    world = None
    for number, raw in enumerate(text.splitlines(), start=1):
        if match := _WORLD.match(raw.strip()):
            world = int(match[1])
        line = raw.strip()
        if line.startswith("#") and not _ASSIGNMENT.match(line):
            continue
        if match := re.fullmatch(r"(?:unset\s+|#\s*unset\s+)(\w+)\s*(?:#.*)?", line):
            environment[match[1]] = (None, number)
            continue
        tokens = list(_tokens(line, variables))
        joined = False
        for token in tokens:
            if (match := _ASSIGNMENT.match(token)) and not token.startswith("--"):
                variables[match[1]] = match[2]
                if match[1].isupper():
                    environment[match[1]] = (match[2], number)
                joined = False
            elif token.startswith("--"):
                flag, given, value = token.partition("=")
                found.append((flag, [value] if given else [], number))
                joined = True
            elif found and (joined or found[-1][2] == number or _continues(raw, token)) and _is_value(token):
                found[-1][1].append(token)
    arguments = tuple(Argument(flag, tuple(values), number) for flag, values, number in found)
    return Script(_trimmed(arguments), environment, world or _ranks(arguments, environment))


def _continues(raw: str, token: str) -> bool:
    """Whether a line of values belongs to the flag on the line before."""
    return raw.strip().split()[:1] == [token] and "(" not in token


def _is_value(token: str) -> bool:
    return token not in ("\\", "&", "&&", "|", ")", "(", ";", "do", "done", "then", "fi")


def _tokens(line: str, variables: Mapping[str, str]) -> Iterator[str]:
    """Words of a line; a line of YAML gives its flag and value."""
    if line.startswith("# env ") or line.startswith("# world_size"):
        line = line.removeprefix("# env ").removeprefix("# ")
    if (match := _YAML.match(line)) and not match[2].startswith("="):
        name, value = match[1], match[2].strip("'\"")
        if name.startswith("--"):
            if value.lower() in ("true", ""):
                yield name
            elif value.lower() != "false":
                yield name
                yield from value.split()
        else:
            yield f"{name}={value}"
        return
    for sign in ("=(", "+=("):
        line = line.replace(sign, " ")
    try:
        parts = shlex.split(line.rstrip("\\"), comments=True)
    except ValueError:
        parts = line.replace('"', " ").replace("'", " ").split()
    for part in parts:
        filled = _VARIABLE.sub(lambda m: variables.get(m[1] or m[3], m[2] or m[0]), part)
        yield from filled.strip("()").split() if "--" in filled and " " in filled else [filled]


def _trimmed(arguments: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """Values only where the option takes some; of one value, the first word."""
    options = megatron_options()
    kept = []
    for argument in arguments:
        form = options[argument.flag].form if argument.flag in options else "list"
        values = {"switch": (), "value": argument.values[:1], "list": argument.values}[form]
        kept.append(Argument(argument.flag, values, argument.line))
    return tuple(kept)


def _ranks(arguments: tuple[Argument, ...], environment: Mapping[str, tuple[str | None, int]]) -> int | None:
    """Ranks by the launcher's flags or by a variable."""
    by_flag = {argument.flag: argument.value for argument in arguments}
    nodes = next((by_flag[flag] for flag in _NODES if flag in by_flag), "")
    per_node = next((by_flag[flag] for flag in _PER_NODE if flag in by_flag), "")
    if nodes.isdecimal() and per_node.isdecimal():
        return int(nodes) * int(per_node)
    given = next((environment[name][0] for name in _WORLD_NAMES if name in environment), None)
    return int(given) if given is not None and given.isdecimal() else None


def read_megatron(script: Script, world_size: int | None = None) -> Reading:
    """What arguments say in neutral terms.

    Parameters
    ----------
    script : flags
    world_size : ranks, where the file does not name them; `dp` is 1 where nobody does

    Raises
    ------
    LayoutError
        If the degrees make no layout.
    """
    ranks = script.world_size or world_size
    degrees: dict[str, Any] = {
        "tp": script.number("--tensor-model-parallel-size", 1),
        "pp": script.number("--pipeline-model-parallel-size", 1),
        "ep": script.number("--expert-model-parallel-size", 1),
    }
    degrees |= _context(script)
    degrees["etp"] = script.number("--expert-tensor-parallel-size", 0)
    chunks = stages_of(script)
    degrees["vpp"] = _virtual(script, degrees["pp"], chunks)
    degrees["sequence_parallel"] = script.has("--sequence-parallel") or degrees["tp"] == 1
    model = degrees["tp"] * degrees.get("sp", 1) * degrees.get("cp", 1) * degrees["pp"]
    if ranks is not None:
        if ranks % model:
            raise LayoutError(
                f"{ranks} ranks do not divide into tp x cp x pp = {model}; expected a multiple, or other degrees"
            )
        degrees["dp"] = ranks // model
    degrees |= _sharding(script)
    return Reading(
        Layout(**degrees),
        ranks,
        script.number("--micro-batch-size"),
        script.number("--global-batch-size"),
        script.number("--seq-length"),
        None,
        _settings(script, chunks),
    )


def _context(script: Script) -> dict[str, Any]:
    size = script.number("--context-parallel-size", 1) or 1
    if size == 1:
        return {}
    argument = script.by_flag.get("--cp-comm-type")
    kind = argument.value if argument is not None else "p2p"
    if kind == "a2a":
        return {"sp": size}
    if kind == "a2a+p2p":
        sizes = script.by_flag.get("--hierarchical-context-parallel-sizes")
        parts = [int(value) for value in sizes.values if value.isdecimal()] if sizes is not None else []
        if len(parts) == 2:
            return {"sp": parts[0], "cp": parts[1], "cp_kind": "hybrid"}
    return {"cp": size, "cp_kind": "allgather" if kind == "allgather" else "ring"}


def stages_of(script: Script) -> tuple[int, ...]:
    """Layers of each chunk that a pipeline layout names; empty where there is none.

    Examples
    --------
    >>> stages_of(read_script('--pipeline-model-parallel-layout "Ettt|(tt|)*2,tL"'))
    (3, 2, 2, 1)
    """
    argument = script.by_flag.get("--pipeline-model-parallel-layout")
    if argument is None:
        return ()
    text = argument.value.replace(",", "")
    text = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), text)
    text = re.sub(r"([A-Za-z])\*(\d+)", lambda m: m[1] * int(m[2]), text)
    return tuple(part.count("t") for part in text.split("|"))


def _virtual(script: Script, pp: int, chunks: tuple[int, ...]) -> int:
    if chunks:
        return max(1, len(chunks) // pp)
    stages = script.number("--num-virtual-stages-per-pipeline-rank")
    if stages is not None:
        return stages
    layers, each = script.number("--num-layers"), script.number("--num-layers-per-virtual-pipeline-stage")
    return layers // pp // each if layers and each and layers // pp >= each else 1


def _sharding(script: Script) -> dict[str, Any]:
    instances = script.number("--num-distributed-optimizer-instances", 1) or 1
    if script.has("--use-megatron-fsdp") or script.has("--use-custom-fsdp"):
        argument = script.by_flag.get("--data-parallel-sharding-strategy")
        strategy = argument.value if argument is not None else SHARDING[3]
        zero = {"no_shard": 0, "optim": 1, **{name: stage for stage, name in SHARDING.items()}}.get(strategy, 3)
        return {"zero": zero, "hsdp": instances if zero else 1}
    if script.has("--use-torch-fsdp2"):
        return {"zero": 3}
    zero = int(script.has("--use-distributed-optimizer"))
    return {"zero": zero, "hsdp": instances if zero else 1}


def _dispatcher(script: Script) -> str | None:
    """The way to experts, where it is named and there is one like it here."""
    kind, backend = (
        argument.value if (argument := script.by_flag.get(flag)) is not None else ""
        for flag in ("--moe-token-dispatcher-type", "--moe-flex-dispatcher-backend")
    )
    flex = "hybrid_ep" if backend == "hybridep" else "deepep"
    return {"alltoall": "all_to_all", "allgather": "all_gather", "flex": flex}.get(kind)


def _settings(script: Script, chunks: tuple[int, ...]) -> dict[str, Any]:
    gather = script.has("--overlap-param-gather")
    settings: dict[str, Any] = {
        "dp_overlap": "both" if gather else "gradients" if script.has("--overlap-grad-reduce") else "none",
        "tp_overlap": script.has("--tp-comm-overlap"),
        "expert_pairs": script.has("--overlap-moe-expert-parallel-comm"),
    }
    if (dispatcher := _dispatcher(script)) is not None:
        settings["dispatcher"] = dispatcher
    if chunks:
        settings["stage_layers"] = chunks
    bucket = script.number("--ddp-bucket-size")
    if bucket is not None:
        settings["bucket_bytes"] = float(bucket * GRADIENT_BYTES)
    granularity = script.by_flag.get("--recompute-granularity")
    activations = "selective" if script.has("--recompute-activations") else "none"
    settings["recompute"] = activations if granularity is None else granularity.value
    modules = script.by_flag.get("--recompute-modules")
    if settings["recompute"] == "selective":
        settings["recompute_modules"] = ("core_attn",) if modules is None else tuple(modules.values)
    method = script.by_flag.get("--recompute-method")
    if settings["recompute"] == "full" and method is not None:
        settings["recompute_method"] = method.value
        settings["recompute_layers"] = script.number("--recompute-num-layers", 1)
    return settings
