# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 Reading a timeline
#
# A training step of a model in a layout on a machine: how long does it take, where does the time go, what is exposed,
# and what would change that? This notebook simulates a step, draws its pipeline, opens a layer, and then turns the
# knobs one at a time. It takes well under a minute, needs no GPU and no network.

# %%
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pandas as pd
from IPython.display import Image
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from overlapsim.engine import compiled
from overlapsim.hardware.loading import load_cluster
from overlapsim.report.plots import gantt
from overlapsim.report.trace import write_trace
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import BLOCKS
from overlapsim.step.inputs import StepInputs
from overlapsim.step.perturb import Perturbation
from overlapsim.step.pieces import graph_builder
from overlapsim.step.simulate import StepResult, simulate_step, step_prices
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import Composition, compose
from overlapsim.strategy.overlaps import composition
from overlapsim.strategy.tasks import Site
from overlapsim.units import format_bytes, format_time
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.presets import load_preset

scratch = Path(tempfile.mkdtemp())

# %% [markdown]
# ## The question
#
# Llama 3 8B on four nodes of eight H100, tensor parallelism inside pairs of GPUs, four pipeline stages, four replicas;
# 32 sequences of 8192 tokens a step. `StepInputs` is the whole question; `overlapsim simulate` asks the same on the
# command line.

# %%
inputs = StepInputs(
    model=load_preset("llama3-8b"),
    cluster=load_cluster("h100-sxm8").with_nodes(4),
    layout=Layout.parse("tp=2,pp=4,zero=1", world_size=32),
    job=Job(seq_len=8192, micro_batch=1, global_batch=32),
)
result = simulate_step(inputs)
print(f"{inputs.layout}: step {format_time(result.step_time_s)}", end=" ")
print(f"({format_time(result.low_s)} .. {format_time(result.high_s)}), MFU {result.mfu:.1%}")


# %% [markdown]
# ## Where the time goes
#
# The breakdown is of one GPU of the stage that ends last. Each instant counts once: computing, else moving data, else
# waiting for an absent peer (the bubble), else waiting for the host. So the lines add up to the step, and what runs
# beside computation is in none of them: it is hidden.


# %%
def breakdown(results: Mapping[str, StepResult]) -> pd.DataFrame:
    """One column a step, one line a kind of time; zero lines left out."""
    table = pd.DataFrame({name: dict(step.breakdown_s) for name, step in results.items()})
    table = table[(table > 0).any(axis=1)]
    shown = table.map(lambda seconds: f"{seconds * 1e3:.1f} ms")
    shown.loc["step"] = [format_time(step.step_time_s) for step in results.values()]
    shown.loc["MFU"] = [f"{step.mfu:.1%}" for step in results.values()]
    return shown


breakdown({"1F1B": result})

# %% [markdown]
# Memory differs from stage to stage: the first keeps activations of as many micro-batches as there are stages, the last
# holds the logits. `allowance` is an assumption: the context and what the allocator holds beyond what is in use.

# %%
pd.DataFrame(
    {
        f"stage {number}": {kind: format_bytes(size) for kind, size in memory.by_kind().items()}
        | {"all": format_bytes(memory.total_bytes)}
        for number, memory in enumerate(result.memory)
    }
)

# %% [markdown]
# And what the answer stands on: what was not measured, and what was assumed.

# %%
for finding in result.findings:
    print(f"- {finding.code}: {finding.message}")

# %% [markdown]
# ## The pipeline
#
# One row a stage (every GPU of a stage does the same). Forwards are light, backwards dark, the optimizer green;
# transfers lie below the blocks, collectives of the replicas below these. White is waiting. The first stage waits
# behind the warm-up for the first gradient to come back; the last stage has the logits to compute on top of its layers,
# which makes it the slowest: all others wait for it in every round.

# %%
COLOURS = {"forward": "#7fb2e5", "backward": "#2f6db5", "input_grad": "#2f6db5", "weight_grad": "#7b61a8"}
COLOURS |= {"optim.step": "#4f7f3a", "p2p": "#e07b28", "grad": "#b8332f"}


def pipeline(steps: Mapping[str, StepResult], title: str) -> Figure:
    """Blocks, transfers and collectives of every stage, one panel a step."""
    figure = Figure(figsize=(11, 0.8 + 1.75 * len(steps)), layout="constrained", dpi=100)
    axes = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, step) in zip(axes, steps.items(), strict=True):
        program, timeline = step.program.program, step.timeline
        for task in range(program.num_tasks):
            kind = program.op[task].partition(" ")[0].replace("grad.dense", "grad").replace("grad.embed", "grad")
            block = program.kind[task] == BLOCKS
            row = int(step.program.device[task])
            top, height = (row, 0.55) if block else (row + (0.56 if kind == "p2p" else 0.72), 0.14)
            start, end = timeline.t_start[task] / 1e9, timeline.t_end[task] / 1e9
            ax.barh(
                top,
                end - start,
                height,
                left=start,
                align="edge",
                color=COLOURS[kind],
                edgecolor="white",
                linewidth=0.4,
            )
        ax.set_ylim(len(step.memory), 0)
        ax.set_yticks(
            [row + 0.3 for row in range(len(step.memory))], [f"stage {row}" for row in range(len(step.memory))]
        )
        ax.set_title(f"{name}: {format_time(step.step_time_s)}", loc="left", fontsize=10)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
    axes[-1].set_xlabel("time (ms)")
    used = {"forward", "backward", "optim.step", "p2p", "grad"}
    used |= (
        {"weight_grad"} if any("weight_grad" in op for step in steps.values() for op in step.program.pieces) else set()
    )
    names = {"optim.step": "optimizer", "p2p": "transfer", "grad": "gradients and parameters"}
    handles = [Patch(color=COLOURS[kind], label=names.get(kind, kind)) for kind in COLOURS if kind in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure


pipeline({"1F1B": result}, "Llama 3 8B, tp=2, pp=4, dp=4").savefig(scratch / "pipeline.png")
Image(scratch / "pipeline.png")

# %% [markdown]
# ## Other schedules
#
# Interleaving gives each GPU two chunks of the model: the pipeline fills in half the time, for twice as many transfers.
# Zero-bubble (ZB-H1) runs the weight gradients apart, where a stage would wait. Uneven stages take a layer from the
# stage that has the logits. Of the three only ZB-H1 exposes more of tensor parallelism: a backward in one piece hides
# part of what it moves under the weight gradient's GEMM, which is no longer beside it.

# %%
schedules = {
    "1F1B": result,
    "interleaved": simulate_step(replace(inputs, layout=Layout.parse("tp=2,pp=4,vpp=2,zero=1,dp=4")), ranges=False),
    "ZB-H1": simulate_step(replace(inputs, schedule="zb_h1"), ranges=False),
    "1F1B, uneven": simulate_step(replace(inputs, job=replace(inputs.job, stage_layers=(9, 8, 8, 7))), ranges=False),
}
pipeline(schedules, "The same step in other schedules").savefig(scratch / "schedules.png")
Image(scratch / "schedules.png")

# %%
breakdown(schedules)

# %% [markdown]
# ## Inside a layer
#
# A block of the pipeline is a program of its own: one layer's operators, run once in the engine. Its timeline shows
# what tensor parallelism exposes: a gather of the sequence before the GEMMs of attention and of the feed-forward block,
# and a reduce-scatter behind them. `chunked` cuts a GEMM by rows and moves each piece while the next is computed.

# %%
prices = step_prices(inputs)
layer = graph_builder(inputs).layer(inputs.model.layers[0], "forward")
chunked = composition([f"{name}=chunked:chunks=2" for name in ("attn.qkv", "attn.out", "mlp.fc1", "mlp.fc2")])


def run_layer(chosen: Composition):
    """Timeline of one layer's forward with the strategies in it."""
    builder = ProgramBuilder()
    compose(Context(layer, prices), chosen, Site(builder, prices))
    return compiled.run(builder.freeze(), record=True)


gantt({"library kernels": run_layer(Composition()), "chunked": run_layer(chunked)}, scratch / "layer.png")
Image(scratch / "layer.png")

# %% [markdown]
# The same choice in every layer of the step: what was exposed moves under computation, and computation takes a little
# longer, since pieces fill the SMs less well and the collectives hold some of them. Whether that pays is what the
# engine is for; notebook 01 asks it for one pair at a time.

# %%
overlapped = simulate_step(replace(inputs, composition=chunked), ranges=False)
breakdown({"library kernels": result, "chunked": overlapped})

# %% [markdown]
# ## Data parallelism
#
# Without overlap the gradients of a stage are reduced when its last backward is done, and parameters are gathered
# behind the optimizer. In buckets, each starts when its layers are done; the gathers go under the first forwards of the
# next step. The collectives then compete with the blocks for HBM, NICs and SMs.

# %%
data_parallel = {
    overlap: simulate_step(replace(inputs, dp_overlap=overlap), ranges=False)
    for overlap in ("none", "gradients", "both")
}
breakdown(data_parallel)

# %% [markdown]
# Less is exposed, and the step hardly moves. With a pipeline only the first stage's reduction is on the critical path,
# since its last backward is the last of all: the other stages reduce while they would wait anyway (see the picture).
# And the blocks that the collectives run beside take longer. Hiding is not winning: look at the step, not at one line.
#
# ## A slow GPU
#
# One rank at 80 % of its speed (a hot or failing GPU) holds up its stage, and through pipeline and replicas everybody:
# the pipelines that differ are simulated beside each other. Where it stands decides what it costs. Rank 5 is in the
# first stage, which waits for the last one most of the time; rank 29 is in the last stage.

# %%
for rank in (5, 29):
    slow = simulate_step(replace(inputs, perturbation=Perturbation.parse(f"slow=0.8@{rank}")), ranges=False)
    longer = slow.step_time_s / result.step_time_s - 1
    print(f"rank {rank} at 0.8 of its speed: {format_time(slow.step_time_s)} ({longer:+.1%})")

# %% [markdown]
# ## In Perfetto
#
# The same timeline as a trace, with every number in the arguments of its slices: open the file in ui.perfetto.dev.
# `overlapsim simulate ... --trace step.json.gz` writes it from the command line.

# %%
write_trace(result.timeline, scratch / "step.json.gz", title="llama3-8b, one GPU of each stage")
print(format_bytes((scratch / "step.json.gz").stat().st_size))
