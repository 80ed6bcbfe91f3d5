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
# # 02 Choose a layout
#
# A model, a cluster and a batch: how should the model be split over the GPUs? This notebook plans Llama 3 8B on two
# nodes of eight H100, reads why the best plan is best and how sure that is, and then asks what would change it: less
# memory, one slow GPU, a slower network. It needs no GPU and no network.

# %%
import tempfile
from dataclasses import replace
from pathlib import Path

import pandas as pd
from IPython.display import Image

from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import StepPlanInputs, dump_plan, load_plan
from overlapsim.planner.explain import advise, exposed_s
from overlapsim.planner.search import PlanRequest
from overlapsim.planner.space import Axes, Constraint
from overlapsim.planner.step import Goal, StepAnswer, plan_step
from overlapsim.planner.step_plan import model_digest, replay_step, to_step_plan
from overlapsim.planner.trials import difference
from overlapsim.report.plan_plot import plan_plot
from overlapsim.report.plots import gantt
from overlapsim.step.perturb import Perturbation
from overlapsim.step.simulate import simulate_step
from overlapsim.units import format_bytes, format_time
from overlapsim.workload.presets import load_preset

scratch = Path(tempfile.mkdtemp())

# %% [markdown]
# ## The question
#
# `Axes` says what may vary, `Constraint` what must hold. What is given here is what a Megatron user has: an optimizer
# that is whole or sharded (ZeRO 0 or 1) and the usual pipeline schedules. On the command line, over a larger space:
# `overlapsim plan llama3-8b --cluster h100-sxm8 --nodes 2 --global-batch 128 --seq 8192 --constraint 'zero<=1'`.

# %%
model = load_preset("llama3-8b")
cluster = load_cluster("h100-sxm8").with_nodes(2)
axes = Axes(
    zero=(0, 1), micro_batch=(1, 2), schedule=("1f1b", "interleaved"), recompute=("none", "full"), dp_overlap=("both",)
)
rules = tuple(map(Constraint.parse, ("tp<=8", "pp<=4", "sp=1")))
request = PlanRequest(model, cluster, global_batch=128, sequence=8192, axes=axes, constraints=rules)
answer = plan_step(request)


# %%
def table(answer: StepAnswer) -> pd.DataFrame:
    """One line a plan: layout, settings, time with its range, memory of the fullest GPU, exposed communication."""
    lines = []
    for entry in answer.ranked:
        result, inputs = entry.result, entry.result.inputs
        shown = entry.perturbed or result
        lines.append(
            {
                "layout": str(inputs.layout),
                "micro-batch": inputs.job.micro_batch,
                "recompute": inputs.recompute.granularity,
                "strategies": ", ".join(sorted({s.name for s in inputs.composition.strategies})),
                "step": format_time(shown.step_time_s),
                "90 % range": f"{format_time(shown.low_s)} .. {format_time(shown.high_s)}",
                "MFU": f"{result.mfu:.1%}",
                "memory": format_bytes(result.fullest.total_bytes),
                "exposed": format_time(exposed_s(result.breakdown_s)),
            }
        )
    return pd.DataFrame(lines, index=[entry.rank for entry in answer.ranked])


print(f"{answer.searched:,} candidates, {answer.run} run in the engine")
table(answer)

# %% [markdown]
# Nothing that could be among the best is left out: a candidate is dropped because it cannot fit, or because a bound
# that its simulated time cannot go below is above the best plans found.

# %%
pd.Series(answer.pruned, name="left out")

# %% [markdown]
# ## Why, and how sure
#
# Ranges of two plans overlap nearly always, since both stand on the same beliefs about GEMMs and links. What matters is
# the range of their *difference*, where each belief moves both plans together.

# %%
advice = advise(answer)
for sentence in (*advice.why, *advice.near, *advice.exposed):
    print("-", sentence)

# %%
best = answer.ranked[0].result
for entry in answer.ranked[1:]:
    gap = difference(best, entry.result)
    print(f"plan {entry.rank} takes {gap.value_s:+.3f} s more: {gap.low_s:+.3f} .. {gap.high_s:+.3f} s")

# %% [markdown]
# Which of them to run first, and what to measure to decide between them:

# %%
for trial in advice.try_on_hardware:
    print(f"try plan {trial.rank}: {trial.reason}")
for measurement in advice.measure_next:
    print(f"measure {measurement.message}")

# %% [markdown]
# ## The plan file
#
# A plan file holds the question, every plan with its settings, and the advice. Read back, it simulates to its numbers.

# %%
asked = StepPlanInputs(
    model.name, model_digest(model), "h100-sxm8", cluster.digest, 2, 128, 8192, constraints=tuple(map(str, rules))
)
plan = to_step_plan(answer, asked, {})
again = replay_step(load_plan(dump_plan(plan)), model, cluster)
assert simulate_step(again.inputs, ranges=False).step_time_s == plan.choice.step.value_s
print(dump_plan(plan)[:1200], "...")

# %%
plan_plot(plan, scratch / "plans.png")
Image(scratch / "plans.png", width=900)

# %%
gantt({"plan 1": best.timeline}, scratch / "timeline.png", title=str(best.inputs.layout))
Image(scratch / "timeline.png", width=900)

# %% [markdown]
# ## What would change it
#
# Half the memory:

# %%
table(plan_step(replace(request, memory_bytes=40e9, top=3)))

# %% [markdown]
# One GPU that runs at 0.8 of its speed, plans ranked by the high end of their range (`--objective robust --perturb
# slow=0.8@0`):

# %%
table(plan_step(replace(request, top=3), Goal("robust", Perturbation.parse("slow=0.8@0"))))

# %% [markdown]
# NICs of a tenth of the rate:

# %%
nic_bandwidth = cluster.node.nic_bandwidth_bytes_per_s / 10
slow = replace(cluster, node=replace(cluster.node, nic_bandwidth_bytes_per_s=nic_bandwidth))
table(plan_step(replace(request, cluster=slow, top=3)))
