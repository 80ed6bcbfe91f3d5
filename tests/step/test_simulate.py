"""Whole steps: the breakdown is the step, closed forms of pipelines, degenerate layouts, memory, ranges."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlapsim.cost.prices import PriceBook
from overlapsim.errors import LayoutError, StrategyError, UsageError
from overlapsim.hardware.loading import load_cluster
from overlapsim.schedule.pipeline_bubbles import StageTimes
from overlapsim.schedule.pipeline_kinds import SCHEDULES
from overlapsim.schedule.program import BLOCKS
from overlapsim.step.categories import COMM_KINDS, COMPUTE_KINDS, KINDS
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import StagePieces, graph_builder
from overlapsim.step.simulate import simulate_step, step_prices, step_schedule
from overlapsim.strategy.compose import Chosen, Composition
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.families import gpt
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.model_count import step_flop_per_token
from overlapsim.workload.presets import load_preset
from overlapsim.workload.recompute import Recompute
from tests.step.steps import A100, GPT, MODELS, MOE, ask, run, step, steps

# Where the time goes


@given(steps())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_breakdown_is_the_step(inputs: StepInputs) -> None:
    """Every instant of the device that ends last counts once, and no kind is negative."""
    result = run(inputs)
    assert list(result.breakdown_s) == list(KINDS)
    assert min(result.breakdown_s.values()) >= 0
    assert sum(result.breakdown_s.values()) == pytest.approx(result.step_time_s, rel=1e-9)
    compute = sum(result.breakdown_s[kind] for kind in COMPUTE_KINDS)
    assert 0 < compute <= result.step_time_s * (1 + 1e-9)
    # A step never beats its products at the dense peak.
    assert 0 < result.mfu < 1
    assert result.hfu >= result.mfu


@given(steps())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_step_is_the_same_when_asked_again(inputs: StepInputs) -> None:
    first, second = run(inputs), simulate_step(inputs, ranges=False)
    assert first.step_time_s == second.step_time_s
    assert first.breakdown_s == second.breakdown_s


def test_kinds_that_a_layout_does_not_have_take_no_time() -> None:
    alone = step(GPT, "dp=1", 4).breakdown_s
    assert [kind for kind in COMM_KINDS if alone[kind]] == []
    assert alone["bubble"] == 0
    dp = step(GPT, "dp=4", 4).breakdown_s
    assert [kind for kind in COMM_KINDS if dp[kind]] == ["exposed_dp"]
    tp = step(GPT, "tp=4", 4).breakdown_s
    assert tp["exposed_tp"] > 0 == tp["exposed_dp"]
    experts = step(MOE, "dp=4,ep=4", 4).breakdown_s
    assert experts["exposed_ep"] > 0 == experts["exposed_tp"]
    assert step(GPT, "sp=4", 4).breakdown_s["exposed_sp"] > 0
    pipeline = step(GPT, "pp=4", 4).breakdown_s
    assert pipeline["exposed_pp"] + pipeline["bubble"] > 0


# Degenerate layouts: the sum of their parts


def parts_of(inputs: StepInputs) -> float:
    """Layers, ends and optimizer one after another, from pieces simulated alone."""
    prices, schedule = step_prices(inputs, MODELS), step_schedule(inputs)
    pieces = StagePieces(inputs, prices, schedule)
    seconds = sum(pieces.stage(0, which).duration_s for which in ("forward", "backward"))
    return inputs.num_micro_batches * seconds


@pytest.mark.parametrize("layout", ["dp=1", "tp=2", "sp=2", "cp=2", "tp=4,sequence_parallel=off"])
def test_without_pipeline_and_data_parallelism_a_step_is_its_micro_batches(layout: str) -> None:
    inputs = ask(GPT, layout, 4, contention=False)
    result = run(inputs)
    # Ulysses and context ranks hold the same weights and reduce their gradients.
    rest = result.breakdown_s["optimizer"] + result.breakdown_s["exposed_dp"]
    assert result.step_time_s == pytest.approx(parts_of(inputs) + rest, rel=1e-6)


def test_one_gpu_runs_the_kernels_of_its_graphs() -> None:
    """Without launch costs or communication a step is the sum of its operators' prices."""
    inputs = ask(GPT, "dp=1", 2, contention=False)
    prices: PriceBook = step_prices(inputs, MODELS)
    builder = graph_builder(inputs)
    graphs = [builder.layer(GPT.layers[0], which) for which in ("forward", "backward")]
    ends = [make(which) for make in (builder.embedding, builder.head) for which in ("forward", "backward")]
    micro_batch = GPT.num_layers * sum(map(prices.serial_s, graphs)) + sum(map(prices.serial_s, ends))
    result = run(inputs)
    # CTAs of a GEMM fill whole waves.
    assert result.step_time_s == pytest.approx(2 * micro_batch + result.breakdown_s["optimizer"], rel=0.01)
    assert result.breakdown_s["host"] == 0


def test_micro_batches_cost_alike() -> None:
    """A step is linear in its micro-batches without a pipeline, and in the part beyond the first with one."""
    for layout in ("tp=2", "pp=4"):
        times = [step(GPT, layout, count).step_time_s for count in (4, 8, 12)]
        assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=1e-3)


def test_more_data_parallel_gpus_compute_less_and_never_more() -> None:
    batch = 32
    compute = []
    for dp in (1, 2, 4, 8, 16):
        found = step(GPT, f"dp={dp}", batch).breakdown_s
        compute.append(sum(found[kind] for kind in COMPUTE_KINDS) - found["optimizer"])
    assert all(b < a for a, b in pairwise(compute))
    assert compute[-1] == pytest.approx(compute[0] / 16, rel=0.02)


# Closed forms of pipelines


def blocks_only(num_layers: int = 8) -> ModelSpec:
    """Layers alone: the ends of a model without a vocabulary are nothing."""
    return replace(gpt(num_layers, 1024, 8, 51200, 2048), vocabulary=128, tied_embeddings=False)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv", "dualpipe", "dualpipev"])
def test_equal_blocks_give_the_published_bubble(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stages that are alike and free transfers, the most that a device idles is the published closed form."""
    pp, count = 4, 16
    kind = SCHEDULES[schedule]
    vpp = 2 if kind.stages_per_device in (None, 2) else 1
    layout = f"pp={pp}" + (f",vpp={vpp}" if vpp > 1 else "")
    # 8 layers a device, so that every chunk holds the same; ends left out; forward and halves of a backward alike.
    monkeypatch.setattr(StagePieces, "_ends", lambda self, stage, which: type(self.stage(0, which))())
    inputs = ask(replace(GPT, tied_embeddings=False), layout, count, schedule=schedule, p2p="overlapped")
    seconds = {"forward": 1e-3, "backward": 2e-3, "input_grad": 1e-3, "weight_grad": 1e-3}
    monkeypatch.setattr(StagePieces, "stage", lambda self, stage, which: piece(seconds[which] / vpp))
    monkeypatch.setattr(StagePieces, "pair", lambda self, forward, backward: piece(3e-3 / vpp))
    monkeypatch.setattr("overlapsim.step.line.Line.transfer", lambda *_: None)
    result = run(inputs)
    program, timeline = result.program.program, result.timeline
    idle = []
    for device in range(pp):
        own = (result.program.device == device) & (program.kind == BLOCKS)
        own &= np.array([not op.startswith("optim.") for op in program.op])
        start, end = timeline.t_start[own], timeline.t_end[own]
        idle.append(int(end.max() - start.min() - (end - start).sum()))
    unit = round(1e9 / vpp)
    times = StageTimes(unit, unit, unit)
    assert kind.bubble is not None
    # DualPipe's form is of stages: two copies of the model share its devices.
    assert max(idle) == pytest.approx(kind.bubble(pp, vpp, times), abs=100)


def piece(seconds: float):
    from overlapsim.step.blocks import Piece

    return Piece(seconds, {"gemm": seconds})


def test_1f1b_of_equal_stages_takes_the_closed_form() -> None:
    """(m + p - 1)(F + B) and one transfer a hop each way, from real blocks without ends."""
    pp, count = 4, 12
    inputs = ask(replace(blocks_only(8), vocabulary=128), f"pp={pp}", count, p2p="overlapped", contention=False)
    result = run(inputs)
    pieces = StagePieces(inputs, step_prices(inputs, MODELS), step_schedule(inputs))
    middle = sum(pieces.stage(1, which).duration_s for which in ("forward", "backward"))
    ends = sum(pieces.stage(s, w).duration_s for s in (0, pp - 1) for w in ("forward", "backward")) - 2 * middle
    least = (count + pp - 1) * middle
    # Ends and transfers are small here: they bound what the closed form leaves out.
    assert least <= result.step_time_s <= least + (count + pp) * ends + 0.05 * least


def test_virtual_stages_shrink_the_bubble() -> None:
    """From 1 to 2 chunks a stage the bubble halves (transfers that take no time from computation)."""
    model = replace(GPT, layers=GPT.layers * 4, tied_embeddings=False)
    plain, twice = (
        step(model, layout, 8, p2p="overlapped", seq=2048).breakdown_s["bubble"] for layout in ("pp=4", "pp=4,vpp=2")
    )
    assert plain > twice > 0.3 * plain


# Data parallelism


def test_overlapped_gradients_hide() -> None:
    exposed = {
        overlap: step(GPT, "dp=16", 32, dp_overlap=overlap, bucket_bytes=25e6).breakdown_s["exposed_dp"]
        for overlap in ("none", "gradients")
    }
    assert 0 < exposed["gradients"] < exposed["none"]


def test_zero_gathers_parameters_and_steps_a_shard() -> None:
    plain, sharded = step(GPT, "dp=8", 8), step(GPT, "dp=8,zero=1", 8)
    # The norm's all-reduce stays.
    assert sharded.breakdown_s["optimizer"] < 0.3 * plain.breakdown_s["optimizer"]
    assert sharded.fullest.optimizer == pytest.approx(plain.fullest.optimizer / 8)


def test_a_tied_embedding_is_reduced_between_the_ends() -> None:
    ops = step(GPT, "pp=4", 4).program.program.op
    assert ops.count("grad.embed") == 2
    assert "grad.embed" not in step(replace(GPT, tied_embeddings=False), "pp=4", 4).program.program.op
    assert "grad.embed" not in step(GPT, "dp=4", 4).program.program.op


# Recompute, host, contention, clock


def test_full_recompute_runs_the_forward_again() -> None:
    none, full = (step(GPT, "dp=1", 4, recompute=Recompute.parse(text)) for text in ("none", "full"))
    longer = full.step_time_s / none.step_time_s
    assert 1.15 < longer < 1.4
    assert full.hfu / full.mfu == pytest.approx(4 / 3, rel=0.1)
    assert none.hfu == none.mfu
    assert full.fullest.activations < none.fullest.activations


def test_hosts_bound_small_steps_and_not_large_ones() -> None:
    small = gpt(num_layers=8, hidden=256, num_heads=4, vocabulary=1024, max_positions=256)
    slow, fast = (step(small, "dp=1", 4, seq=256, stack=stack) for stack in ("megatron-2021", "graph"))
    assert slow.breakdown_s["host"] > 0.5 * slow.step_time_s
    assert fast.breakdown_s["host"] == 0
    large = step(load_preset("gpt3-175b"), "tp=8,pp=4", 4, seq=2048, stack="megatron-2021")
    assert large.breakdown_s["host"] < 0.01 * large.step_time_s


def test_contention_only_stretches() -> None:
    for layout in ("dp=16", "tp=4,pp=2,dp=2", "tp=8,dp=2"):
        free, real = (
            step(GPT, layout, 32, dp_overlap="gradients", contention=contention).step_time_s
            for contention in (False, True)
        )
        assert real >= free


def test_a_lower_clock_takes_its_share() -> None:
    full, derated = (step(GPT, "dp=1", 4, sustained_clock=share) for share in (1.0, 0.8))
    ratio = derated.breakdown_s["gemm"] / full.breakdown_s["gemm"]
    assert ratio == pytest.approx(1 / 0.8, rel=0.01)
    assert derated.breakdown_s["optimizer"] == full.breakdown_s["optimizer"]


# Rates and ranges


def test_rates_are_the_step_over_its_flop() -> None:
    result = step(GPT, "tp=2,dp=2", 8)
    flop = step_flop_per_token(GPT, 1024) * 8 * 1024
    assert result.model_flop == flop
    assert result.tokens_per_s == 8 * 1024 / result.step_time_s
    assert result.mfu == pytest.approx(flop / result.step_time_s / 4 / 312e12)


def test_ranges_hold_the_value() -> None:
    result = simulate_step(ask(GPT, "tp=2,pp=2,dp=2", 8), models=MODELS)
    assert 0 < result.low_s < result.step_time_s < result.high_s
    assert result.high_s < 2 * result.step_time_s
    exact = run(ask(GPT, "tp=2,pp=2,dp=2", 8))
    assert (exact.step_time_s, exact.low_s, exact.high_s) == (result.step_time_s,) * 3


@given(st.integers(1, 40), st.sampled_from(("tp=2", "pp=2", "dp=2", "tp=2,pp=2,vpp=2")))
@settings(max_examples=12, deadline=None)
def test_long_steps_keep_their_time(power: int, layout: str) -> None:
    """Slower and slower prices (up to 10^8 s): no time overflows and parts keep their proportion; else one error."""
    inputs = ask(GPT, layout, 4, seq=1024)
    slower = 2.0**power
    plain = run(inputs)
    try:
        scaled = _scaled(inputs, slower)
    except UsageError as error:
        assert plain.step_time_s * slower > 60
        assert "the engine takes at most" in str(error)
        return
    assert scaled == pytest.approx(plain.step_time_s * slower, rel=0.02)


def _scaled(inputs: StepInputs, factor: float) -> float:
    import overlapsim.step.simulate as module

    prices = step_prices(inputs, MODELS)
    for family in module.FAMILIES:
        prices = prices.scaled(family, factor)
    _, timeline = module._run(inputs, prices, step_schedule(inputs))
    return timeline.duration_s


# Strategies by operator


def test_strategies_take_their_operator_in_every_layer() -> None:
    """Chunked pairs hide tensor-parallel communication; other graphs of the step go on without them."""
    chunked = load_strategy("chunked")
    model = replace(load_preset("gpt3-175b"), layers=load_preset("gpt3-175b").layers[:8])
    pairs = {("mlp.fc2", "fwd"): Chosen(chunked, {"chunks": 4}), ("mlp.fc1", "fwd"): Chosen(chunked, {"chunks": 4})}
    plain, overlapped = (
        step(model, "tp=8,pp=2", 8, seq=2048, composition=composition)
        for composition in (Composition(), Composition(pairs=pairs))
    )
    assert overlapped.breakdown_s["exposed_tp"] < plain.breakdown_s["exposed_tp"]
    assert overlapped.step_time_s < plain.step_time_s
    codes = {finding.code for finding in overlapped.findings}
    assert codes >= {finding.code for finding in plain.findings}


def test_a_strategy_for_an_operator_that_is_not_there() -> None:
    chosen = {("moe.fc2", "fwd"): Chosen(load_strategy("chunked"), {"chunks": 4})}
    with pytest.raises(StrategyError, match=r"chosen for moe.fc2 fwd, and no layer of gpt has such a GEMM"):
        step(GPT, "tp=2", 4, composition=Composition(pairs=chosen))
    # One that is there without a collective to hide is refused by name too.
    chosen = {("mlp.fc2", "fwd"): Chosen(load_strategy("chunked"), {"chunks": 4})}
    with pytest.raises(StrategyError, match=r"mlp\.fc2 fwd"):
        step(GPT, "dp=2", 4, composition=Composition(pairs=chosen))


# Bad input


@pytest.mark.parametrize(
    ("layout", "more", "message"),
    [
        ("tp=3", {}, "tp is 3"),
        ("pp=3", {}, "8 layers do not divide"),
        ("dp=2,ep=2", {}, "has no experts"),
        ("cp=8", {"seq": 1000}, "does not divide by 2 x cp = 16"),
        ("dp=3", {}, "does not divide into 3 data-parallel replicas"),
        ("pp=2", {"schedule": "1f1bb"}, "did you mean '1f1b'"),
        ("pp=2", {"schedule": "zbv"}, "pp=2, vpp=1 make 2 chunks"),
        ("pp=2,vpp=2", {"batch": 3}, "3 micro-batches do not divide by pp = 2"),
        ("pp=4,vpp=2", {"schedule": "1f1b", "batch": 8}, "vpp is the stages of a device"),
    ],
)
def test_impossible_steps_give_one_reason(layout: str, more: dict, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        run(ask(GPT, layout, **more))


def test_more_ranks_than_gpus() -> None:
    with pytest.raises(LayoutError, match=r"16 ranks and a100-sxm8 with 1 node\(s\) has 8 GPUs"):
        StepInputs(GPT, A100, Layout(dp=16), Job(1024, global_batch=16))


def test_types_that_a_gpu_does_not_have() -> None:
    from overlapsim.errors import ProfileError

    inputs = StepInputs(GPT, load_cluster("v100s-pcie8"), Layout(), Job(1024, global_batch=1))
    with pytest.raises(ProfileError, match="no bf16 rate; it has fp16"):
        run(inputs)


# Memory follows the schedule


def kept(schedule: str, layout: str = "pp=4", batch: int = 16, **more) -> list[float]:
    """Activations of each device, in those of one micro-batch on one stage of a plain pipeline."""
    from overlapsim.step.simulate import step_memory

    model = replace(GPT, tied_embeddings=False)
    inputs = ask(model, layout, batch, schedule=schedule, **more)
    one = ask(model, "pp=4", 4, schedule="1f1b")
    unit = step_memory(one, step_schedule(one))[3].activations
    return [memory.activations / unit for memory in step_memory(inputs, step_schedule(inputs))]


def test_activations_in_flight_by_schedule() -> None:
    """GPipe keeps all, 1F1B one a stage behind; zero-bubble schedules what their papers say, weight gradients too."""
    assert kept("gpipe") == pytest.approx([16] * 4)
    assert kept("1f1b") == pytest.approx([4, 3, 2, 1])
    # 2401.10241: ZB-H1 as much as 1F1B's first stage on each device, ZB-H2 and (in halves of a stage) ZBV 2p - 1, p.
    assert kept("zb_h1") == pytest.approx([4] * 4)
    assert kept("zb_h2") == pytest.approx([7] * 4)
    assert kept("zbv", "pp=4,vpp=2") == pytest.approx([4] * 4)
    # Interleaved: (p - d) 2 - 1 + (v - 1) p more chunks before the first backward (Narayanan et al., 2021).
    assert kept("interleaved", "pp=4,vpp=2") == pytest.approx([(2 * (3 - d) + 4 + 1) / 2 for d in range(4)])
    # DualPipe: p + 1 on every device.
    assert kept("dualpipe") == pytest.approx([5] * 4)


def test_dualpipe_holds_two_copies_of_the_model() -> None:
    plain, twice = (step(GPT, "pp=4", 16, schedule=name).memory for name in ("1f1b", "dualpipe"))
    for device in range(4):
        for kind in ("parameters", "gradients", "optimizer"):
            expected = getattr(plain[device], kind) + getattr(plain[3 - device], kind)
            assert getattr(twice[device], kind) == pytest.approx(expected)
    assert twice[0].logits == twice[3].logits == plain[3].logits


def test_shared_cost_models_never_mix_models_up() -> None:
    """Models that come and go share what a cluster costs, and no block: an identity is not used twice."""
    shared: dict[object, object] = {}
    for hidden in (512, 1024, 2048, 1536, 512, 1024, 2048, 1536):
        model = gpt(num_layers=2, hidden=hidden, num_heads=8, vocabulary=1024, max_positions=1024)
        inputs = ask(model, "dp=1", 2)
        together, alone = (simulate_step(inputs, ranges=False, models=models) for models in (shared, None))
        assert together.step_time_s == alone.step_time_s
        del model, inputs, together, alone
