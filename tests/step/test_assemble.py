"""The program of a step: a pipeline of blocks, transfers, buckets, gathers and the optimizer, each where it belongs."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from overlapsim.schedule.program import BLOCKS, FLOW
from overlapsim.step.assemble import StepProgram
from overlapsim.step.inputs import StepInputs
from overlapsim.step.line import STEPS_PER_LAYER
from overlapsim.step.simulate import StepResult
from overlapsim.step.traffic import MOST_BUCKETS, stage_traffic
from overlapsim.workload.stage_weights import stage_parameters
from tests.step.steps import GPT, MOE, ask, run, step, steps


def ops(found: StepProgram, pattern: str) -> list[int]:
    return [task for task, op in enumerate(found.program.op) if re.fullmatch(pattern, op)]


def ends(result: StepResult, pattern: str) -> np.ndarray:
    return result.timeline.t_end[ops(result.program, pattern)]


def starts(result: StepResult, pattern: str) -> np.ndarray:
    return result.timeline.t_start[ops(result.program, pattern)]


@given(steps())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_micro_batch_passes_every_stage(inputs: StepInputs) -> None:
    """Forwards and backwards (whole, in halves or in pairs) are there once a micro-batch and stage."""
    result = run(inputs)
    found = result.program
    assert result.timeline.complete
    stages, count = inputs.layout.pp * inputs.layout.vpp, inputs.num_micro_batches
    forward, backward = len(ops(found, r"forward \d+")), len(ops(found, r"backward \d+"))
    pairs = len(ops(found, r"pair \d+ \d+"))
    halves = len(ops(found, r"input_grad \d+"))
    assert halves == len(ops(found, r"weight_grad \d+"))
    assert forward + pairs == backward + pairs + halves == stages * count
    assert len(ops(found, r"optim\.step \d+")) == inputs.layout.pp
    # A transfer between each two stages on different devices, both ways.
    if inputs.schedule == "":
        assert len(ops(found, "p2p")) == 2 * (stages - 1) * count


def test_every_task_is_on_a_device_of_the_pipeline() -> None:
    found = step(GPT, "pp=4,dp=2", 8).program
    assert set(found.device.tolist()) == {0, 1, 2, 3}
    transfers = ops(found, "p2p")
    assert set(np.abs(found.receiver[transfers] - found.device[transfers]).tolist()) == {1}
    others = np.setdiff1d(np.arange(found.program.num_tasks), transfers)
    assert set(found.receiver[others].tolist()) == {-1}


def test_blocks_have_units_where_buckets_start_within_them() -> None:
    """So that the buckets of a layer's gradients can start when it is done; else a block is one unit."""
    found = step(GPT, "pp=4,dp=2", 8, dp_overlap="gradients").program
    layers = {int(found.program.units[task]) for task in ops(found, r"(forward|backward) \d+")}
    assert layers == {2 * STEPS_PER_LAYER}
    found = step(GPT, "pp=4", 4).program
    program = found.program
    assert {int(program.units[task]) for task in ops(found, r"(forward|backward) \d+")} == {1}
    assert all(program.sm[task] == 1 for task in ops(found, r"forward \d+"))


def test_the_optimizer_waits_for_everything() -> None:
    """The norm of the gradients is of all of them: no optimizer starts before the last reduction of any device."""
    result = step(GPT, "pp=4,dp=4", 16, dp_overlap="gradients", bucket_bytes=10e6)
    reduced = ends(result, r"grad\..*")
    assert starts(result, r"optim\.step \d+").min() >= max(reduced.max(), ends(result, r"backward \d+").max())


def test_buckets_start_when_their_layers_are_done() -> None:
    """Overlapped reductions start within the last backward; without overlap all wait for its end."""
    for overlap, early in (("none", False), ("gradients", True)):
        result = step(GPT, "dp=8", 16, dp_overlap=overlap, bucket_bytes=50e6)
        last = ends(result, r"backward \d+").max()
        found = starts(result, r"grad\.dense")
        assert bool(found.min() < last) is early
        assert len(found) == (1 if overlap == "none" else len(stage_traffic(result.inputs, 0).reduce))


@pytest.mark.parametrize("zero", [1, 2])
def test_gathers_stand_behind_the_optimizer_or_before_the_forwards(zero: int) -> None:
    after = step(GPT, f"dp=8,zero={zero}", 16)
    gathers = [t for t in ops(after.program, r"grad\.dense") if "all_gather" in after.program.program.tag[t]]
    assert gathers
    assert after.timeline.t_start[gathers].min() >= ends(after, r"optim\.step \d+").max()
    before = step(GPT, f"dp=8,zero={zero}", 16, dp_overlap="both")
    gathers = [t for t in ops(before.program, r"grad\.dense") if "all_gather" in before.program.program.tag[t]]
    assert len(gathers) > 1
    assert before.timeline.t_start[gathers].min() == 0
    # The first layer's parameters are there before its forward begins.
    assert starts(before, r"forward \d+").min() >= before.timeline.t_end[gathers].min()


def test_bytes_of_the_traffic() -> None:
    """Gradients of a stage in fp32 are reduced once, parameters in two bytes gathered once, in at most 32 pieces."""
    for layout in ("dp=8", "dp=8,zero=1", "tp=2,dp=4", "pp=2,dp=4"):
        inputs = ask(GPT, layout, 16, dp_overlap="both", bucket_bytes=1e6)
        local = stage_parameters(GPT, inputs.layout, 0).dense
        traffic = stage_traffic(inputs, 0)
        assert sum(op.size_bytes for op, _ in traffic.reduce) == pytest.approx(4 * local)
        assert len(traffic.reduce) == MOST_BUCKETS
        done = [share for _, share in traffic.reduce]
        assert done == sorted(done)
        assert done[-1] == 1
        gathered = sum(op.size_bytes for op, _ in traffic.gather)
        assert gathered == pytest.approx(2 * local if inputs.layout.zero else 0)


def test_experts_are_reduced_over_their_own_ranks() -> None:
    inputs = ask(MOE, "dp=8,ep=4", 8)
    local = stage_parameters(MOE, inputs.layout, 0)
    sizes = {op.name: (op.size_bytes, op.ranks, op.group) for op, _ in stage_traffic(inputs, 0).reduce}
    assert sizes == {
        "grad.dense": (4.0 * local.dense, 8, "dp_cp"),
        "grad.expert": (4.0 * local.expert, 2, "edp"),
    }
    whole = ask(MOE, "dp=8,ep=8", 8)
    assert {op.name for op, _ in stage_traffic(whole, 0).reduce} == {"grad.dense"}


def test_hybrid_shards_scatter_and_sum() -> None:
    """HSDP: a scatter over the ranks of a set of shards, then a sum of each shard over the sets."""
    inputs = ask(GPT, "dp=8,zero=1,hsdp=2", 8)
    local = stage_parameters(GPT, inputs.layout, 0).dense
    found = [(op.kind, op.ranks, op.size_bytes, op.group) for op, _ in stage_traffic(inputs, 0).reduce]
    assert found == [
        ("reduce_scatter", 4, 4.0 * local, "shard"),
        ("all_reduce", 2, 4.0 * local / 4, "replica"),
    ]


def test_transfers_carry_the_hidden_activations() -> None:
    """A slice a tensor-parallel rank with sequence parallelism or scatter/gather, all of them otherwise."""
    whole = 1024 * 1024 * 2
    for layout, more, sent in (
        ("pp=2", {}, whole),
        ("tp=4,pp=2", {}, whole / 4),
        ("tp=4,pp=2,sequence_parallel=off", {}, whole / 4),
        ("tp=4,pp=2,sequence_parallel=off", {"scatter_gather": False}, whole),
        ("sp=2,pp=2", {}, whole / 2),
    ):
        found = step(GPT, layout, 4, **more).program
        program = found.program
        task = ops(found, "p2p")[0]
        carried = {
            program.resource_name[program.demand_resource[j]]: program.demand_amount[j] * program.units[task]
            for j in range(program.demand_ptr[task], program.demand_ptr[task + 1])
        }
        assert carried["nvlink_out[0]"] == pytest.approx(sent), layout


def test_collectives_hold_sms_and_transfers_do_not() -> None:
    found = step(GPT, "pp=2,dp=8", 8, dp_overlap="gradients").program
    program = found.program
    assert all(program.sm[task] == 0 for task in ops(found, "p2p"))
    assert all(program.sm[task] > 0 for task in ops(found, r"grad\.dense"))
    kinds = {int(program.kind[task]) for task in ops(found, r"(forward|backward|optim\.step) \d+")}
    assert kinds == {BLOCKS}
    assert {int(program.kind[task]) for task in ops(found, "p2p")} == {FLOW}


def test_blocks_longer_than_the_engines_unit_are_cut() -> None:
    """A layer of minutes: more units, the same time, and gates still stand at its layers."""
    inputs = ask(GPT, "dp=2,zero=1", 2, seq=2048, dp_overlap="both")
    import overlapsim.step.simulate as module

    prices = module.step_prices(inputs)
    for family in module.FAMILIES:
        prices = prices.scaled(family, 2.0**18)
    found, timeline = module._run(inputs, prices, module.step_schedule(inputs))
    assert int(found.program.unit_ps.max()) < 2**46
    assert max(int(found.program.units[task]) for task in ops(found, r"backward \d+")) > GPT.num_layers
    plain = run(inputs)
    assert timeline.duration_s == pytest.approx(plain.step_time_s * 2**18, rel=0.02)
