"""From measured rows to what `simulate_step` is asked: one A100 profile, and for each table what its software did."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal

from overlapsim.accuracy.steps_data import Measured, Published
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.profile import Cluster, Fit, Source
from overlapsim.plan import Finding
from overlapsim.step.inputs import DpOverlap, StepInputs
from overlapsim.workload.families import gpt
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.presets import load_preset
from overlapsim.workload.recipe import RECIPES, Recipe
from overlapsim.workload.recompute import Recompute
from overlapsim.workload.stages import spread_layers
from overlapsim.workload.state_precision import state_precision
from overlapsim.workload.utilization import megatron_step_flop

VTRAIN_CLUSTER: Final = "a100-sxm8-4nic"
SELENE: Final = "a100-sxm8"
LLAMA_CLUSTER: Final = "h100-sxm8"
STACK: Final = "megatron-2021"
PROFILED: Final = "megatron-2021-profiled"
"""Stack of the composed table: its passes were profiled one by one."""
VOCABULARY: Final = 50257
SEQUENCE: Final = 2048
LLAMA_SEQUENCE: Final = 8192
FINDINGS: Final = (
    Finding(
        "vtrain_not_stated",
        "vTrain does not state precision, gradients' width, A100 memory, sequence parallelism or fused kernels: taken "
        "for all multi-node rows are fp16 with fp32 gradients, no sequence parallelism, fused softmax, no flash "
        "attention; recompute of whole layers and no overlap of data parallelism are stated",
    ),
    Finding(
        "vtrain_single_composed",
        "the single-node table is composed from profiled operators, not measured end to end (it is linear in "
        "micro-batches and layers to rounding): it says nothing on pipeline transfers, stragglers or jitter. Taken for "
        "all of its rows: passes of a layer profiled one by one, which the hosts of a group start in step and on idle "
        "GPUs, no recompute, no fused kernels (softmax, biases), fp16 gradients, and an unpadded vocabulary with TP 1",
    ),
    Finding(
        "sc21_not_stated",
        "SC'21 does not print micro-batches, virtual stages and gradients' width: those of the run scripts published "
        "with its code are taken (fp16; with PP 1 torch's data parallelism, which overlaps the reduction)",
    ),
    Finding(
        "megascale_not_stated",
        "MegaScale does not say what its Megatron-LM recomputes: selective recompute with sequence parallelism, and "
        "micro-batches of one, are taken for all rows",
    ),
    Finding(
        "llama3_not_stated",
        "Llama 3 does not print virtual stages or clocks: one layer a chunk, the H100's table rates; its long runs at "
        "700 W imply about 0.8 of these (report only)",
    ),
)


@dataclass(frozen=True)
class Constants:
    """What eager hosts cost; prior unless a fit says otherwise.

    Attributes
    ----------
    host_s : from one launch to the next
    """

    host_s: float


def with_constants(cluster: Cluster, constants: Constants | None) -> Cluster:
    """The cluster with its GPU's stack of profiled passes at given constants."""
    if constants is None:
        return cluster
    fit = Fit("launch", PROFILED, {"host_s": constants.host_s}, Source("derived", "suite steps", "medium"), 0)
    device = replace(cluster.device, fits={**cluster.device.fits, f"launch.{PROFILED}": fit})
    return replace(cluster, node=replace(cluster.node, device=device))


@lru_cache(maxsize=64)
def vtrain_model(hidden: int, heads: int, layers: int, seq_len: int) -> ModelSpec:
    """GPT of a row; the same object each time, so that layers are simulated once."""
    return gpt(layers, hidden, heads, VOCABULARY, seq_len, dtype="fp16", name=f"vtrain-h{hidden}-l{layers}")


@lru_cache(maxsize=64)
def preset(name: str) -> ModelSpec:
    """A preset; the same object each time."""
    return load_preset(name)


@lru_cache(maxsize=64)
def machine(name: str, nodes: int, constants: Constants | None = None) -> Cluster:
    """A bundled cluster of so many nodes."""
    return with_constants(load_cluster(name), constants).with_nodes(nodes)


def vtrain_inputs(row: Measured, constants: Constants | None = None) -> StepInputs:
    """The question of one row of vTrain's tables."""
    recipe: Recipe = RECIPES["megatron-2021"]
    gradient, granularity = "fp32", "full"
    if row.one_node:
        multiple = 1 if row.tp == 1 else recipe.vocabulary_multiple
        recipe = replace(recipe, fused_softmax=False, fused_bias=False, vocabulary_multiple=multiple)
        gradient, granularity = "fp16", "none"
    return StepInputs(
        vtrain_model(*row.model),
        machine(VTRAIN_CLUSTER, -(-row.gpus // 8), constants),
        Layout(tp=row.tp, pp=row.pp, dp=row.dp, sequence_parallel=False),
        Job(row.seq_len, row.micro_batch, row.global_batch),
        recompute=Recompute.parse(granularity),
        recipe=recipe,
        precision=state_precision("fp16", gradient=gradient),
        stack=PROFILED if row.one_node else STACK,
        rings="one_way",
    )


def published_inputs(row: Published) -> StepInputs:
    """The question of one step of a paper."""
    model = preset(row.model)
    llama = row.group.startswith("llama")
    layout = Layout(
        tp=row.tp,
        pp=row.pp,
        vpp=row.virtual,
        dp=row.gpus // (row.tp * row.pp),
        sequence_parallel=row.split,
        zero=1 if llama else 0,
    )
    cluster = machine(LLAMA_CLUSTER if llama else SELENE, row.gpus // 8)
    if llama:
        stages = spread_layers(model.num_layers, row.pp * row.virtual)
        job = Job(LLAMA_SEQUENCE, row.micro_batch, row.batch, stage_layers=stages)
        return StepInputs(model, cluster, layout, job, dp_overlap="both", stack="graph")
    early = row.group.startswith("sc21")
    overlap: DpOverlap = "gradients" if early and row.pp == 1 else "none"
    return StepInputs(
        model,
        cluster,
        layout,
        Job(SEQUENCE, row.micro_batch, row.batch),
        recompute=Recompute.parse(row.recompute),
        recipe=RECIPES["megatron-2021" if early else "megatron-2022"],
        precision=state_precision(model.dtype, gradient="fp16" if early else "fp32"),
        stack=STACK,
        dp_overlap=overlap,
        rings="one_way",
    )


def layer_inputs(recompute: str, split: bool) -> StepInputs:
    """The question of Korthikanti's table of one layer: 22B, TP 8, micro-batch 4."""
    return StepInputs(
        preset("korthikanti-22b"),
        machine(SELENE, 1),
        Layout(tp=8, sequence_parallel=split),
        Job(SEQUENCE, 4, 4),
        recompute=Recompute.parse(recompute),
        recipe=RECIPES["megatron-2022"],
        stack=STACK,
        rings="one_way",
    )


def measured_seconds(row: Published, model_flop: float, peak_flop_per_s: float) -> float:
    """Seconds of a step that a paper gives in seconds, TFLOP/s a GPU (Megatron-LM's count) or MFU."""
    unit: Literal["s", "TFLOP/s", "MFU %"] | str = row.unit
    if unit == "s":
        return row.value
    if unit == "MFU %":
        return model_flop / (row.gpus * peak_flop_per_s * row.value / 100)
    model = preset(row.model)
    flop = megatron_step_flop(row.batch, SEQUENCE, model.num_layers, model.hidden, model.vocabulary)
    return flop / (row.gpus * row.value * 1e12)
