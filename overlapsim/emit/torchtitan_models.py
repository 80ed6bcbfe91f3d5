"""Models that torchtitan ships, by the names of the presets here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from overlapsim.workload.model import ModelSpec


@dataclass(frozen=True)
class Flavor:
    """A model in torchtitan.

    Attributes
    ----------
    name, flavor : as configs of 0.2.2 call it
    function : in the ``config_registry`` of 0.3.0; empty where it has none
    """

    name: str
    flavor: str
    function: str = ""


FLAVORS: Final[Mapping[str, Flavor]] = {
    "llama3-8b": Flavor("llama3", "8B", "llama3_8b"),
    "llama3-70b": Flavor("llama3", "70B", "llama3_70b"),
    "llama3-405b": Flavor("llama3", "405B", "llama3_405b"),
    "qwen3-30b-a3b": Flavor("qwen3", "30B-A3B", "qwen3_30b_a3b"),
    "deepseek-v2": Flavor("deepseek_v3", "236B"),
    "deepseek-v3": Flavor("deepseek_v3", "671B", "deepseek_v3_671b"),
    "gpt-oss-120b": Flavor("gpt_oss", "120b", "gpt_oss_120b"),
}
"""By preset (torchtitan 0.2.2 and 0.3.0, their model registries)."""


def preset_of(name: str, flavor: str) -> str | None:
    """Preset of a model that torchtitan ships; None where there is none.

    Examples
    --------
    >>> preset_of("llama3", "70B")
    'llama3-70b'
    """
    return next((p for p, known in FLAVORS.items() if (known.name, known.flavor) == (name, flavor)), None)


def preset_of_function(function: str) -> str | None:
    """Preset of a function in the ``config_registry``; None where there is none."""
    return next((p for p, known in FLAVORS.items() if function and known.function == function), None)


def stage_modules(layers: tuple[int, ...], head: str) -> tuple[tuple[str, ...], ...]:
    """Module names of each chunk of the model.

    Parameters
    ----------
    layers : of each chunk
    head : name of the output projection: ``output``, ``lm_head`` from 0.3.0 on

    Examples
    --------
    >>> stage_modules((1, 2), "output")
    (('tok_embeddings', 'layers.0'), ('layers.1', 'layers.2', 'norm', 'output'))
    """
    found: list[tuple[str, ...]] = []
    first = 0
    for place, count in enumerate(layers):
        names = tuple(f"layers.{number}" for number in range(first, first + count))
        before = ("tok_embeddings",) if place == 0 else ()
        after = ("norm", head) if place == len(layers) - 1 else ()
        found.append((*before, *names, *after))
        first += count
    return tuple(found)


def chunk_layers(model: ModelSpec, stages: int, uneven: tuple[int, ...]) -> tuple[int, ...]:
    """Layers of each chunk, even ones filled in."""
    return uneven or (model.num_layers // stages,) * stages
