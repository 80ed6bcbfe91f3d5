"""Copies of attention's weights in a node: the four steps, their bytes and order; gradients compressed to bf16."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from overlapsim.cost.memory_bound import memory_cost
from overlapsim.cost.structural import bus_factor
from overlapsim.errors import UsageError
from overlapsim.step.compressed import compression_findings
from overlapsim.step.perturb import Perturbation
from overlapsim.step.simulate import step_memory, step_prices, step_schedule
from overlapsim.step.synchronisation import INNER, OUTER, two_levels
from overlapsim.step.traffic import StageTraffic, local_work, stage_traffic, stream_seconds
from overlapsim.workload.layout import Layout
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.operators import CollectiveOp
from overlapsim.workload.presets import load_preset
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.stage_weights import stage_parameters
from tests.step.steps import GPT, MOE, ask, run

SP, TP = "sp=8,dp=2,zero=1", "tp=8,dp=2,zero=1"
MIXTRAL = replace(load_preset("megascale-mixtral-8x7b"), layers=load_preset("megascale-mixtral-8x7b").layers[:2])
NARROW = Recipe(compress=("grads-bf16",))


def sent(traffic: StageTraffic, group: str) -> float:
    """Bytes that one GPU sends over a kind of group."""
    ops = [op for op, _ in (*traffic.reduce, *traffic.gather) if op.group == group]
    return sum(op.size_bytes * bus_factor(op.kind, op.ranks) for op in ops)


def test_four_steps_and_their_bytes() -> None:
    """Between nodes 2 (P/n)(d-1)/d, as with tensor parallelism, and within one 2 P (n-1)/n (MegaScale-MoE, A.1)."""
    inputs = ask(GPT, SP, 16)
    traffic, local = stage_traffic(inputs, 0), stage_parameters(GPT, inputs.layout, 0).dense
    steps = [(op.kind, op.group) for op, _ in (*traffic.reduce, *traffic.gather)]
    assert list(dict.fromkeys(steps)) == [
        ("reduce_scatter", INNER),
        ("reduce_scatter", OUTER),
        ("all_gather", OUTER),
        ("all_gather", INNER),
    ]
    n, d, both = 8, 2, 4 + 2
    assert sent(traffic, OUTER) == pytest.approx(both * local / n * (d - 1) / d)
    assert sent(traffic, INNER) == pytest.approx(both * local * (n - 1) / n)
    # Tensor parallelism has an eighth of the weights, norms apart.
    copied, split = (stage_traffic(ask(MIXTRAL, f"{layout},ep=8,etp=1", 16), 0) for layout in (SP, TP))
    split = StageTraffic(*([e for e in part if e[0].name == "grad.dense"] for part in (split.reduce, split.gather)))  # type: ignore[arg-type]
    whole = sum(op.size_bytes * bus_factor(op.kind, op.ranks) for op, _ in (*split.reduce, *split.gather))
    assert sent(copied, OUTER) == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("sp=8,dp=2", {}),
        ("sp=8,zero=1", {}),
        ("sp=2,dp=4,zero=1", {}),
        ("sp=8,dp=4,zero=1,hsdp=2", {}),
        ("sp=4,cp=2,dp=2,zero=1", {}),
        ("sp=8,dp=2,zero=3", {}),
        (SP, {"dp_sync": "flat"}),
        (SP, {"rank_order": ("dp", "sp", "tp", "cp", "ep", "pp")}),
    ],
)
def test_where_one_group_takes_all(layout: str, more: dict[str, object]) -> None:
    """Nothing sharded once a step, no copies or no nodes beyond, another split of the shards, or as asked."""
    assert not two_levels(ask(GPT, layout, 32, **more))
    assert two_levels(ask(GPT, SP, 32))


@pytest.mark.parametrize("overlap", ["none", "gradients", "both"])
def test_levels_follow_each_other_piece_by_piece(overlap: str) -> None:
    result = run(ask(MIXTRAL, "sp=8,ep=8,dp=2,zero=1", 16, dp_overlap=overlap))
    program, line = result.program.program, result.timeline

    def tasks(kind: str, group: str) -> list[int]:
        return [t for t in range(program.num_tasks) if program.tag[t] == f"{kind} [{group}]"]

    for kind, first, second in (("reduce_scatter", INNER, OUTER), ("all_gather", OUTER, INNER)):
        before, after = tasks(kind, first), tasks(kind, second)
        assert len(before) == len(after) > 1
        assert np.all(line.t_start[after] >= line.t_end[before])
    # Steps within the node hide behind those between nodes: some run at once.
    inner, outer = tasks("reduce_scatter", INNER), tasks("reduce_scatter", "edp") + tasks("reduce_scatter", OUTER)
    together = [
        (i, o) for i in inner for o in outer if line.t_start[i] < line.t_end[o] and line.t_start[o] < line.t_end[i]
    ]
    assert together


def test_steps_within_a_node_wait_for_no_other_pipeline() -> None:
    slow = Perturbation.parse("slow=0.7@3")
    result = run(ask(MIXTRAL, "sp=8,ep=8,dp=2,zero=1", 16, perturbation=slow))
    program, line = result.program.program, result.timeline
    inner = [t for t in range(program.num_tasks) if program.tag[t] == f"reduce_scatter [{INNER}]"]
    outer = [t for t in range(program.num_tasks) if program.tag[t] == f"reduce_scatter [{OUTER}]"]
    by_device = {device: [t for t in inner if result.program.device[t] == device] for device in (0, 1)}
    first, second = (line.t_start[tasks].min() for tasks in by_device.values())
    assert first != second
    assert line.t_start[outer].min() >= max(first, second)


def test_two_levels_are_faster_than_one_group() -> None:
    for more in ({}, {"dp_overlap": "both"}, {"recipe": NARROW}):
        levels, flat = (
            run(ask(MIXTRAL, "sp=8,ep=8,dp=2,zero=1", 16, dp_sync=how, **more)) for how in ("hierarchical", "flat")
        )
        assert levels.step_time_s < flat.step_time_s


def test_longest_stream() -> None:
    ops = [
        CollectiveOp("all_gather", size, 2, group=group) for size, group in ((3.0, INNER), (2.0, OUTER), (2.0, "edp"))
    ]
    assert stream_seconds(ops, lambda op: op.size_bytes) == 4.0
    assert stream_seconds([], lambda op: op.size_bytes) == 0.0


@pytest.mark.parametrize("layout", ["dp=8,zero=1", "dp=8,ep=4,zero=2", SP, "dp=8,zero=1,hsdp=2"])
def test_gradients_in_bf16(layout: str) -> None:
    """Half of the bytes, exchanged instead of scattered; steps within a node, and sums of shards, stay in full."""
    model = MOE if "ep" in layout else GPT
    full, narrow = (stage_traffic(ask(model, layout, 16, recipe=recipe), 0) for recipe in (Recipe(), NARROW))
    assert narrow.gather == full.gather
    for (before, done), (after, then) in zip(full.reduce, narrow.reduce, strict=True):
        assert done == then and (before.name, before.ranks, before.group) == (after.name, after.ranks, after.group)
        if before.kind == "reduce_scatter" and before.group != INNER:
            assert (after.kind, after.dtype, after.size_bytes) == ("all_to_all", "bf16", before.size_bytes / 2)
        else:
            assert after == before


def test_casts_and_sums_are_priced() -> None:
    inputs = ask(GPT, "dp=8,zero=1", 16, recipe=NARROW)
    result, prices = run(inputs), step_prices(inputs)
    (op, _), *rest = stage_traffic(inputs, 0).reduce
    assert not rest
    cast, summed = local_work(op)
    count = op.size_bytes / 2
    # fp32 gradients are read and bf16 written; eight copies of an eighth are read, their fp32 sum written.
    assert cast.work.hbm_bytes == pytest.approx(6 * count, rel=1e-3)
    assert summed.work.hbm_bytes == pytest.approx(2 * count + 4 * count / 8, rel=1e-3)
    assert isinstance(cast.work, MemoryOp) and isinstance(summed.work, MemoryOp)
    own = sum(memory_cost(kernel.work, inputs.cluster.device).duration_s for kernel in (cast, summed))  # type: ignore[arg-type]
    (task,) = [
        t
        for t, name in enumerate(result.program.program.op)
        if name == "grad.dense" and "all_to_all" in result.program.program.tag[t]
    ]
    seconds = (result.timeline.t_end[task] - result.timeline.t_start[task]) / 1e12
    assert seconds == pytest.approx(prices.flow(op)[0] + own, rel=1e-6)
    assert local_work(stage_traffic(ask(GPT, "dp=8,zero=1", 16), 0).reduce[0][0]) == ()


def test_whole_shared_experts_are_held_and_summed_by_every_rank() -> None:
    """Tensor parallelism that leaves them whole holds eight times as many, and sums what its ranks made of them."""
    model = replace(load_preset("internal-352b"), layers=load_preset("internal-352b").layers[:2])
    layout, one = "tp=8,ep=8,etp=1", 3 * 4096 * 14336
    split, whole = (ask(model, layout, 8, recipe=Recipe(shared=shared)) for shared in ("joined", "whole"))  # type: ignore[arg-type]
    assert stage_traffic(split, 0).reduce == ()
    ((op, done),) = stage_traffic(whole, 0).reduce
    assert (op.kind, op.group, op.ranks, op.size_bytes, done) == ("all_reduce", "tp", 8, 2 * one * 4, 1.0)
    before, after = (step_memory(inputs, step_schedule(inputs))[0] for inputs in (split, whole))
    assert after.parameters - before.parameters == 2 * 2 * one * 7 / 8
    assert run(whole).breakdown_s["exposed_dp"] > 0
    # Ulysses' ranks hold them whole as it is.
    held = [stage_parameters(model, Layout(sp=8, ep=8), 0, whole_shared=flag) for flag in (False, True)]
    assert held[0] == held[1]


def codes(layout: str, *compress: str, fp8: bool = False) -> dict[str, str]:
    inputs = ask(GPT, layout, 16, recipe=Recipe(compress=compress, fp8=fp8))  # type: ignore[arg-type]
    found = compression_findings(inputs)
    # The device of these tests has no fp8; steps without it say the same.
    assert fp8 or set(found) <= set(run(inputs).findings)
    return {finding.message.partition(":")[0]: finding.code for finding in found}


def test_compression_is_never_silent() -> None:
    assert codes("dp=8,zero=1") == {}
    changes = "accuracy_affecting"
    assert codes("tp=2,dp=4,zero=1", "grads-bf16", "tp-fp8") == {"grads-bf16": changes, "tp-fp8": changes}
    assert codes("dp=8,zero=3", "params-fp8", fp8=True) == {"params-fp8": changes}
    idle = "compression_not_applied"
    for layout in ("dp=8", "dp=8,zero=3", "tp=8,zero=1"):
        assert codes(layout, "grads-bf16") == {"grads-bf16": idle}
    for layout in ("dp=8,zero=1", "tp=2,dp=4,sequence_parallel=off"):
        assert codes(layout, "tp-fp8") == {"tp-fp8": idle}
    assert codes("dp=8", "params-fp8", fp8=True) == {"params-fp8": idle}


@pytest.mark.parametrize("layout", ["dp=8", "dp=8,zero=3"])
def test_what_is_not_applied_changes_no_time(layout: str) -> None:
    plain, asked = (run(ask(GPT, layout, 16, recipe=recipe)) for recipe in (Recipe(), NARROW))
    assert asked.step_time_s == plain.step_time_s


def test_parameters_in_one_byte_halve_the_gather() -> None:
    sizes = [
        sum(op.size_bytes for op, _ in stage_traffic(ask(GPT, "dp=8,zero=1", 16, recipe=recipe), 0).gather)
        for recipe in (Recipe(), Recipe(fp8=True), Recipe(fp8=True, compress=("params-fp8",)))
    ]
    assert sizes[0] == sizes[1] == 2 * sizes[2]


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="dp_sync is 'tree'"):
        ask(GPT, SP, 16, dp_sync="tree")
