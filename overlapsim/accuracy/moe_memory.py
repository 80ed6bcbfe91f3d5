"""Memory of MegaScale-MoE with and without selective activation rematerialisation (figure 17, 128 H800)."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from overlapsim.accuracy.suite import Row
from overlapsim.hardware.catalogue import bundled
from overlapsim.plan import Finding
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.memory import Memory, MemoryModel
from overlapsim.workload.presets import load_preset
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.recompute import Activation, Recompute

GPUS: Final = 128
LAYOUTS: Final[Mapping[str, str]] = {
    "megascale-mixtral-8x7b": "sp=8,ep=8,pp=2,zero=1",
    "megascale-mixtral-8x22b": "sp=8,ep=8,pp=8,zero=1",
}
"""Stages are not printed: with these, parameters, gradients and optimizer take what is shown; no other number does."""
SAVED_OF_TOTAL: Final[Mapping[str, float]] = {"megascale-mixtral-8x7b": 0.213, "megascale-mixtral-8x22b": 0.35}
"""Share of all memory that rematerialisation saves, as printed."""
FINDINGS: Final = (
    Finding(
        "memory_layout_assumed",
        "figure 17 prints neither stages, schedule nor micro-batch: 2 and 8 stages follow from the states that it "
        "shows; 1F1B and one sequence a micro-batch are taken, and the fullest stage is compared",
    ),
    Finding(
        "everything_kept_assumed",
        "without rematerialisation every tensor of a layer's forward pass is taken to stay, as section 4.1 counts "
        "them; a framework that frees what its backward pass does not read saves less by rematerialisation",
    ),
    Finding(
        "activations_not_explained",
        "what figure 17 calls activations is 5 to 8 GB more than kept tensors, logits and the layer at work take, with "
        "and without rematerialisation alike; it is no tensor of the paper's lists and is not modelled",
    ),
)


@dataclass(frozen=True)
class Published:
    """One bar of figure 17, GB."""

    activations: float
    states: float
    other: float
    total: float


class KeepsAll(MemoryModel):
    """Memory of a module that frees no tensor of a layer before its backward pass."""

    def chunk_tensors(self, layout: Layout, stage: int) -> tuple[tuple[tuple[Activation, ...], ...], ...]:
        """Tensors as `MemoryModel` has them, all of them needed."""
        return tuple(
            tuple(tuple(replace(tensor, needed=True) for tensor in layer) for layer in chunk)
            for chunk in super().chunk_tensors(layout, stage)
        )


@cache
def published() -> Mapping[tuple[str, str], Published]:
    """Figure 17 by model and recompute."""
    text = (bundled() / "tables" / "moe" / "memory.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("# "))
    names = ("activations", "states", "other", "total")
    return {(row["model"], row["recompute"]): Published(*(float(row[name]) for name in names)) for row in rows}


def predicted(model: str, recompute: str) -> Memory:
    """Memory of a GPU of the fullest stage."""
    layout = Layout.parse(LAYOUTS[model], GPUS)
    kind = KeepsAll if recompute == "none" else MemoryModel
    memory = kind(load_preset(model), Job(8192), Recipe(dispatcher="all_gather"), Recompute.parse(recompute))
    stages = (memory.stage(layout, stage, (layout.pp - stage,)) for stage in range(layout.pp))
    return max(stages, key=lambda found: found.total_bytes)


def memory_rows() -> tuple[tuple[Row, ...], tuple[Finding, ...]]:
    """Totals, states, what rematerialisation saves, and activations; the last with what is not modelled."""
    return tuple(_rows()), FINDINGS


def _rows() -> Iterator[Row]:
    bars, found = published(), {key: predicted(*key) for key in published()}
    for (model, recompute), memory in found.items():
        bar, name = bars[model, recompute], f"model={model}|recompute={recompute}"
        states = memory.parameters + memory.gradients + memory.optimizer
        yield _row("memory", name, bar.total, memory.total_bytes / 1e9)
        yield _row("memory activations", name, bar.activations, _activations(memory) / 1e9)
        if recompute == "none":
            yield _row("memory states", f"model={model}", bar.states, states / 1e9)
    for model in LAYOUTS:
        whole, less = found[model, "none"], found[model, "sar"]
        saved = bars[model, "none"].activations - bars[model, "sar"].activations
        yield _row("memory saving", f"model={model}", saved, (_activations(whole) - _activations(less)) / 1e9)
        share = 1 - less.total_bytes / whole.total_bytes
        yield _row("memory saving of total", f"model={model}", SAVED_OF_TOTAL[model], share, "ratio")


def _activations(memory: Memory) -> float:
    return memory.activations + memory.logits + memory.buffers


def _row(group: str, name: str, measured: float, value: float, unit: str = "GB") -> Row:
    return Row(f"{group}|{name}", group, measured, value, value, value, unit, None)
