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
# # 01 Will this overlap pay?
#
# One GEMM and the collective of its output: should they overlap, how, and by how much? This notebook plans the
# README's case, looks at the answer from several sides, and then moves the shape and the link to see where overlap
# stops paying and why. It takes well under a minute, needs no GPU and no network.

# %%
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from IPython.display import Image
from matplotlib.figure import Figure

from overlapsim.cost.prices import PriceBook
from overlapsim.hardware.curves import read_curve
from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.operator import QUICK, OperatorResult, plan_operator, simulate
from overlapsim.report.curves import Mark, groups_plot, latency_by_groups
from overlapsim.report.plots import gantt
from overlapsim.strategy.base import Context
from overlapsim.strategy.registry import load_strategies, load_strategy
from overlapsim.units import format_bytes, format_time
from overlapsim.workload.operators import GemmOp, gemm_and_collective

scratch = Path(tempfile.mkdtemp())

# %% [markdown]
# ## The question
#
# Sizes are per rank: `C[m, n] = A[m, k] B[k, n]`, and the collective works on C. A `PriceBook` says what each piece
# costs on a machine. What you measured goes in there and replaces the model; here it is the vendor's GEMM, alone on all
# SMs. The collective's curve comes from the profile of the cluster. Serial execution is always among the strategies: it
# is what every speed-up is measured against, and often the answer.

# %%
cluster = load_cluster("a800-sxm8")
gemm = GemmOp(m=8192, n=8192, k=4096, dtype="fp16", accumulate="fp16")
prices = PriceBook(cluster, ranks=2, gemm=gemm, kind="all_reduce", gemm_time_s=2.042e-3, tile=(256, 128))
context = Context(gemm_and_collective(gemm, "all_reduce", 2), prices)
strategies = sorted(load_strategies(), key=lambda strategy: strategy.overlaps)  # serial first
result = plan_operator(context, strategies)


# %%
def table(result: OperatorResult) -> pd.DataFrame:
    """One line a strategy: time, central 90 % range, speed-up over the best serial execution."""
    lines = {}
    for entry in result.results:
        if entry.prediction is None or entry.best is None:
            lines[entry.strategy.name] = {"choice": "; ".join(entry.applicability.reasons)}
            continue
        time = entry.prediction
        lines[entry.strategy.name] = {
            "predicted": format_time(time.value_s),
            "90 % range": f"{format_time(time.low_s)} .. {format_time(time.high_s)}",
            "speed-up": f"{entry.speedup:.2f} ({entry.speedup_low:.2f} .. {entry.speedup_high:.2f})",
            "choice": ", ".join(f"{name} {value}" for name, value in entry.best.parameters.items()),
        }
    return pd.DataFrame.from_dict(lines, orient="index").fillna("")


pd.set_option("display.max_colwidth", 90)
table(result)

# %% [markdown]
# A speed-up moves both of its times together (a slower GEMM slows serial execution too), so its range is narrower
# than the ranges of the times suggest. The verdict is `overlap`, `serial`, or `tie` where the gain is under 2 % or the
# range holds 1; `ceiling` is what perfect overlap with the best kernels could reach. The public FlashOverlap artifact
# measured this case twice on two A800: serial 3.08 and 3.13 ms, decomposed by rows 2.89 and 2.90 ms, wave groups 2.66
# and 2.69 ms.

# %%
print(f"verdict {result.verdict}, best {result.best.strategy.name}, cause {result.cause}")
print(f"serial {format_time(result.serial.best.predicted_s)}, ceiling {result.ceiling:.2f}x, ", end="")
print(f"no kernels could be faster than {format_time(result.lower_bound_s)}")

# %% [markdown]
# Findings are what was assumed and not measured, and what to measure first. Each that you settle narrows the ranges.

# %%
for finding in result.findings:
    print(f"- {finding.code}: {finding.message}")

# %% [markdown]
# ## What happens on the GPU
#
# The engine's timelines, one below the other. A kernel is drawn as its waves, as high as the SMs they run on: while a
# collective holds SMs, a wave of the GEMM is smaller, and the kernel takes longer. Hatched is a kernel that is ready
# and waits, for SMs or for the signal of its group.


# %%
def timelines(result: OperatorResult) -> dict:
    """Timeline of every strategy that applies, by name."""
    return {
        entry.strategy.name: simulate(entry.strategy, result.context, entry.best.parameters, record=True)
        for entry in result.results
        if entry.best is not None
    }


gantt(timelines(result), scratch / "timelines.png")
Image(scratch / "timelines.png")

# %% [markdown]
# ## How many groups?
#
# `wave_group` signals groups of consecutive waves. Few groups start late; many pay for their launches and for small
# messages. For every number of groups the best split is solved exactly (the recurrence) and run (the engine, which
# knows how collective and GEMM share SMs, HBM and links). A single group is the signalled kernel and then the
# collective: what the strategy's slower kernel costs by itself.

# %%
by_name = {entry.strategy.name: entry for entry in result.results}
wave_group, chunked = by_name["wave_group"], by_name["chunked"]
points = latency_by_groups(context, load_strategy("wave_group"), like=wave_group.best.parameters)
groups_plot(
    points,
    scratch / "groups.png",
    serial_s=result.serial.best.predicted_s,
    others=[Mark(f"chunked in {chunked.best.parameters['chunks']} pieces", chunked.best.predicted_s)],
    title=f"{gemm.m} x {gemm.n} x {gemm.k} {gemm.dtype}, all_reduce over 2 ranks, {cluster.name}",
)
Image(scratch / "groups.png")

# %% [markdown]
# ## Where does overlap pay?
#
# The same machine with eight ranks, other shapes, no GEMM measured. Each cell is the speed-up of the best strategy over
# serial execution; where overlap does not pay, the cause: the first change that would make it pay.

# %%
ROWS = (256, 512, 1024, 2048, 4096, 8192, 16384)
DEPTHS = (512, 1024, 2048, 4096, 8192)
models: dict = {}  # shared between price books: a sweep prices each collective size once


def plan(m: int, k: int, ranks: int = 8) -> OperatorResult:
    """Plan m x 8192 x k bf16 and its all_reduce, quickly: few candidates, no ranges."""
    op = GemmOp(m, 8192, k, "bf16")
    book = PriceBook(cluster, ranks, gemm=op, kind="all_reduce", models=models)
    return plan_operator(Context(gemm_and_collective(op, "all_reduce", ranks), book), strategies, effort=QUICK)


plans = {(m, k): plan(m, k) for m in ROWS for k in DEPTHS}


# %%
def heat_map(plans: dict[tuple[int, int], OperatorResult], title: str) -> Figure:
    """Speed-up of the best strategy by rows and inner size, with its name or the cause of `serial` in the cell."""
    rows, depths = (sorted({key[axis] for key in plans}) for axis in (0, 1))
    speedup = np.array([[plans[m, k].best.speedup for k in depths] for m in rows])
    figure = Figure(figsize=(8.4, 5.0), layout="constrained", dpi=100)
    ax = figure.add_subplot()
    image = ax.imshow(speedup, origin="lower", cmap="Blues", vmin=1.0, vmax=max(1.3, speedup.max()), aspect="auto")
    for i, m in enumerate(rows):
        for j, k in enumerate(depths):
            cell = plans[m, k]
            what = cell.best.strategy.name if cell.verdict == "overlap" else f"{cell.verdict}:\n{cell.cause}"
            dark = speedup[i, j] > 1 + 0.6 * (image.get_clim()[1] - 1)
            text = f"{speedup[i, j]:.2f}x\n{what}"
            ax.text(j, i, text, ha="center", va="center", fontsize=7.5, color="white" if dark else "#1c1c22")
    ax.set_xticks(range(len(depths)), depths)
    ax.set_yticks(range(len(rows)), rows)
    ax.set(xlabel="K", ylabel="M")
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    figure.colorbar(image, ax=ax, label="speed-up over serial").outline.set_visible(False)
    return figure


heat_map(plans, f"M x 8192 x K bf16 and all_reduce over 8 ranks, {cluster.name}").savefig(scratch / "map.png")
Image(scratch / "map.png")

# %% [markdown]
# The gain is largest where GEMM and collective take about as long. To the right the GEMM dwarfs the collective, to the
# left the collective dwarfs the GEMM: either way there is less to gain, and the ceiling comes down to 1. Further down
# the output is small, and what overlap costs by itself decides:
#
# | cause | what stands in the way |
# |---|---|
# | `under_one_wave` | all tiles run at once: nothing is ready before the kernel ends |
# | `small_message` | pieces of the collective are so small that each costs its latency again |
# | `kernel_slower` | the signalled kernel loses more to the vendor's than overlap gains |
# | `contention` | the SMs or the HBM rate that the collective takes slow the GEMM by more than is hidden |
# | `link_bound` | the collective takes more than twice as long as the GEMM that should hide it |
# | `few_tiles` | too few waves to make groups of |
# | `little_to_hide` | even perfect overlap would gain less than 2 % |

# %% [markdown]
# ## What if the link were twice as fast?
#
# `scaled` multiplies the times of one cost family. The best gain lies where compute and communication are balanced, so
# a faster link can make overlap pay less, though every time falls.

# %%
lines = {}
for speed in (0.25, 0.5, 1.0, 2.0, 4.0):
    changed = plan_operator(replace(context, prices=prices.scaled("collective", 1 / speed)), strategies)
    lines[f"{speed:g} x link"] = {
        "serial": format_time(changed.serial.best.predicted_s),
        "best": format_time(changed.best.best.predicted_s),
        "strategy": changed.best.strategy.name,
        "speed-up": round(changed.best.speedup, 3),
        "ceiling": round(changed.ceiling, 3),
        "verdict": changed.verdict,
        "cause": changed.cause,
    }
pd.DataFrame.from_dict(lines, orient="index")

# %% [markdown]
# ## Your own curve, your own kernel times
#
# Three measurements settle most of the answer: the vendor's GEMM alone, the strategy's own kernel alone, and the
# collective at a few sizes (with nccl-tests: `size` and `time` of the out-of-place columns). A curve is a CSV of
# `size_bytes,time_s`. Here is one of a link that is slow for small messages, and the time it takes for the groups of
# the plan above.

# %%
own = scratch / "my_curve.csv"
own.write_text(
    "size_bytes,time_s\n1048576,90e-6\n4194304,150e-6\n16777216,270e-6\n67108864,720e-6\n134217728,1.35e-3\n"
)
curve = read_curve(own)
tile_bytes = 256 * 128 * 2
sizes = [tiles * tile_bytes for tiles in wave_group.best.parameters["group_tiles"]]
measured = PriceBook(
    cluster,
    ranks=2,
    gemm=gemm,
    kind="all_reduce",
    tile=(256, 128),
    gemm_time_s=2.10e-3,
    kernel_time_s={"wave_group": 2.30e-3},
    curve=curve,
)
seconds = measured.collective_seconds("all_reduce", sizes, 2)
print("; ".join(f"{format_bytes(size)} in {format_time(time)}" for size, time in zip(sizes, seconds, strict=True)))

# %%
own_result = plan_operator(replace(context, prices=measured), strategies)
print(f"verdict {own_result.verdict}, cause {own_result.cause}, ceiling {own_result.ceiling:.2f}x")
for finding in own_result.findings:
    print(f"- {finding.code}")
table(own_result)

# %% [markdown]
# Slow small messages call for fewer, larger groups. From here: `overlapsim operator --curve my_curve.csv --gemm-time
# 2.10ms --kernel-time wave_group=2.30ms ...` gives the same answer on the command line and writes it to a plan file;
# `docs/cli.md` has all options.
