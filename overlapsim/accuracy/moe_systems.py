"""The systems of MegaScale-MoE's evaluation as explicit settings: what each runs, and nothing else differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, Literal

from overlapsim.accuracy.moe_fused import fused_pairs, pruned, worthwhile
from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import Finding
from overlapsim.step.capacity import memory_shortfall
from overlapsim.step.inputs import StepInputs
from overlapsim.step.simulate import step_memory, step_schedule
from overlapsim.strategy.compose import Chosen, Composition
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.model import ModelSpec, MoE
from overlapsim.workload.presets import load_model
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.recompute import Recompute

MODELS: Final[Mapping[str, str]] = {
    "M1": "internal-352b",
    "M2": "megascale-mixtral-8x7b",
    "M3": "megascale-mixtral-8x22b",
    "M4": "megascale-hunyuan-large",
    "M5": "megascale-phi-3.5-moe",
    "M6": "megascale-deepseekmoe",
}
"""Models of Table 2 by the paper's short names."""
CLUSTERS: Final[Mapping[str, str]] = {"h800": "h800-sxm8", "a100": "a100-sxm8", "h20": "h20-sxm8"}
SEQUENCE: Final = 8192
NODE: Final = 8
STAGES: Final = 15
"""Pipeline stages of the 352B model."""
CHUNKS: Final = 2
"""Chunks of a stage (two layers each), in every system: assumed, see `ASSUMED`."""
FEWEST: Final[Mapping[str, int]] = {"M1": 240}
OTHERS_FEWEST: Final = 32
"""GPUs by which recompute is chosen."""
STACK: Final = "megatron-2021"
"""How every system launches kernels: eager, at the host time that published steps of one node have (LAUNCH-VTRAIN)."""
CLOCKS: Final[Mapping[str, float]] = {"h800": 0.8, "a100": 0.87, "h20": 1.0}
"""Clock of a long run over that of a short benchmark, of every system on a GPU (hwprofiles/SOURCES.md, OVL-CLOCK):
0.8 of H100s in published training, 257 of 295 TFLOP/s of an A100 with random values; an H20 computes too little for its
power to limit it."""

Half = Literal["tp", "sp", "ep"]


@dataclass(frozen=True)
class System:
    """One system: how a node is split, which kernels run, and what is overlapped.

    Attributes
    ----------
    attention : ``tp`` or ``sp`` over the node
    experts : ``tp`` or ``ep`` over the node
    recipe : listed kernel choices
    recompute : what backward passes may rebuild, least first: the first that fits memory is taken
    inter : operators are ordered, and communicate beside others
    intra : GEMMs and their exchanges are one kernel
    """

    attention: Half
    experts: Half
    recipe: Recipe = field(default_factory=Recipe)
    recompute: tuple[str, ...] = ("none", "sar")
    inter: bool = False
    intra: bool = False

    def layout(self, gpus: int, stages: int = 1) -> Layout:
        """Its layout on so many GPUs, ``dp`` following."""
        inner = {"tp": f"tp={NODE}", "sp": f"sp={NODE}"}[self.attention]
        outer = f"ep={NODE},etp=1" if self.experts == "ep" else f"ep=1,etp={NODE}"
        chunks = CHUNKS if stages > 1 else 1
        return Layout.parse(f"{inner},{outer},pp={stages},vpp={chunks},zero=1", gpus)


_OWN: Final = Recipe(router="drop_chain", shared="joined", dispatcher="all_gather")
_EP: Final = replace(_OWN, dispatcher="all_to_all", shared="whole")
SYSTEMS: Final[Mapping[str, System]] = {
    # Commit f1f03922 with its gather-based dispatcher, torch permutation and one GEMM an expert (Transformer Engine).
    "megatron-lm": System(
        "tp",
        "tp",
        Recipe(rope="torch", router="chain", permutation="torch", experts="looped", dispatcher="all_gather"),
        ("none", "moe+shared_experts", "full"),
    ),
    "baseline": System("tp", "tp", _OWN),
    # Up to six copies of a token are exchanged, more would be gathered (section 3.2).
    "sp-ep": System("sp", "ep", _EP),
    "inter": System("sp", "ep", _EP, ("sar",), inter=True),
    "megascale-moe": System("sp", "ep", _EP, ("sar",), inter=True, intra=True),
    # Parallelism alone (Fig. 14).
    "tp+tp": System("tp", "tp", _OWN),
    "sp+tp": System("sp", "tp", _OWN),
    "tp+ep": System("tp", "ep", _EP),
    "sp+ep": System("sp", "ep", _EP),
}
"""Systems by name: Table 5's steps, Table 3's two ends, Fig. 14's layouts."""

ASSUMED: Final = (
    Finding(
        "virtual_stages_assumed",
        "352B: every system interleaves two chunks of two layers a stage; the paper prints none, and without "
        "interleaving the bubble alone would cost more at 1440 GPUs than either system lost from 240 on",
    ),
    Finding("micro_batch_assumed", "micro-batches of one sequence in every system; the paper prints none"),
    Finding(
        "shared_expert_recovered",
        "352B has one expert more that every token takes, in no table, and how it is split is not printed: taken as "
        "the routed ones are, tensor-parallel on the rows gathered for them, or whole on each rank for its own tokens; "
        "Megatron-LM's gathers for itself",
    ),
    Finding(
        "clock_assumed",
        "GEMMs of every system run at 0.8 of the rate of short benchmarks on H800 (as published Llama-3 training "
        "implies), at 0.87 on A100 and at all of it on H20",
    ),
    Finding(
        "gating_assumed",
        "routing kernels of Megatron-LM are counted in its code; those of the in-house systems, which drop tokens, are "
        "as many as give 'other' of one row (Fig. 13, MegaScale-MoE on H800), which is not scored; the host time of a "
        "launch is that of published steps of Megatron-LM (LAUNCH-VTRAIN)",
    ),
    Finding(
        "recompute_assumed",
        "no table says what is recomputed: each system takes the least of its own options with which the model fits on "
        "the fewest GPUs (Megatron-LM: nothing, MoE layers, all; in-house: nothing, SAR); so Megatron-LM runs the 352B "
        "model with --moe-layer-recompute, and Mixtral-8x7B without",
    ),
    Finding(
        "unexplained_1.41",
        "the paper's Megatron-LM takes 1.41 times as long as the baseline of its ablation (39.04 s over 27.66 s), and "
        "no step of the ablation says why: here it comes of listed kernels and of assumed recompute",
    ),
    Finding("compression_assumed", "no compressed communication: the paper gives no throughput with it"),
)
"""What no table says, the same for all systems."""


def step_inputs(
    system: str | System,
    model: str,
    gpus: int,
    batch: int,
    *,
    gpu: str = "h800",
    layers: int | None = None,
    as_printed: bool = False,
) -> StepInputs:
    """A training step of a system.

    Parameters
    ----------
    system : name in `SYSTEMS`, or the system
    model : ``M1`` .. ``M6``; ``M1`` runs in 15 pipeline stages, unless `gpus` is one node
    gpus, batch : GPUs, and sequences of a step
    gpu : key of `CLUSTERS`
    layers : of the model; all by default
    as_printed : 352B without the expert that no table has, as all others are taken
    """
    chosen = SYSTEMS[system] if isinstance(system, str) else system
    spec = model_spec(model, layers, as_printed=as_printed)
    cluster = load_cluster(CLUSTERS[gpu])
    cluster = cluster.with_nodes(-(-gpus // cluster.node.num_devices))
    stages = STAGES if model == "M1" and gpus > NODE else 1
    recompute = _recompute(system, model) if isinstance(system, str) and gpus > NODE else chosen.recompute[0]
    inputs = StepInputs(
        spec,
        cluster,
        chosen.layout(gpus, stages),
        Job(SEQUENCE, 1, batch),
        p2p="overlapped",
        recompute=Recompute.parse(recompute),
        recipe=chosen.recipe,
        stack=STACK,
        dp_overlap="both",
        sustained_clock=CLOCKS[gpu],
    )
    arranging = (Chosen(load_strategy("operator_order"), {"beam": 16, "sms": 0}),) if chosen.inter else ()
    if not chosen.intra:
        return replace(inputs, composition=Composition(arranging))
    pairs = worthwhile(inputs, fused_pairs(inputs), arranging)
    return pruned(replace(inputs, composition=Composition(arranging, pairs)))


@lru_cache
def _recompute(system: str, model: str) -> str:
    """The least recompute of a system with which a model fits on the fewest H800 that the paper runs it on.

    Runs on more GPUs, and on GPUs with as much memory or more, keep it, as a benchmark keeps its flags.
    """
    chosen, gpus = SYSTEMS[system], FEWEST.get(model, OTHERS_FEWEST)
    cluster = load_cluster(CLUSTERS["h800"]).with_nodes(gpus // NODE)
    stages = STAGES if model == "M1" else 1
    layout, job = chosen.layout(gpus, stages), Job(SEQUENCE, 1, 3 * gpus)
    for option in chosen.recompute:
        inputs = StepInputs(
            model_spec(model), cluster, layout, job, recompute=Recompute.parse(option), recipe=chosen.recipe
        )
        if fits(inputs):
            return option
    return chosen.recompute[-1]


def fits(inputs: StepInputs) -> bool:
    """Whether a step fits the memory of its GPUs."""
    return memory_shortfall(inputs, step_memory(inputs, step_schedule(inputs))) is None


def model_spec(model: str, layers: int | None = None, *, as_printed: bool = False) -> ModelSpec:
    """A model of Table 2, with its first layers alone where `layers` is given; `as_printed` without shared experts."""
    spec, _ = load_model(MODELS[model])
    first = spec.layers[0]
    if as_printed and isinstance(first.mlp, MoE) and first.mlp.shared is not None:
        routed = replace(first.mlp, num_shared_experts=0, shared=None)
        spec = replace(spec, layers=(replace(first, mlp=routed),) * spec.num_layers)
    return spec if layers is None else replace(spec, layers=spec.layers[:layers])
