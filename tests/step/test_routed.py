"""Steps with uneven routing and with each dispatcher: what grows, what stays, and that extremes stay sane."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overlapsim.errors import UsageError
from overlapsim.hardware.loading import load_cluster
from overlapsim.step.blocks import simulate_piece
from overlapsim.step.capacity import memory_shortfall
from overlapsim.step.inputs import StepInputs
from overlapsim.step.machine import machine_prices
from overlapsim.step.perturb import Perturbation
from overlapsim.step.queues import with_queues
from overlapsim.step.routed import expert_load, fullest_possible, routing_findings
from overlapsim.step.simulate import StepResult, simulate_step
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import Composition
from overlapsim.workload.dispatchers import DISPATCHERS
from overlapsim.workload.families import gpt
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.operators import COMPUTE, CollectiveOp, GemmOp, KernelOp, OperatorGraph
from overlapsim.workload.presets import load_preset
from overlapsim.workload.recipe import Recipe, with_dispatch
from overlapsim.workload.routes import DEFAULT_SMS, Route, RouteMethod

QWEN = replace(load_preset("qwen3-30b-a3b"), layers=load_preset("qwen3-30b-a3b").layers[:2])
FOUR = replace(QWEN, layers=QWEN.layers[:1] * 4)
MIXTRAL = replace(load_preset("mixtral-8x7b"), layers=load_preset("mixtral-8x7b").layers[:2])
TOP1 = replace(load_preset("hunyuan-large"), layers=load_preset("hunyuan-large").layers[1:3])


def step(text: str = "", model: ModelSpec = QWEN, dispatch: str = "", seq: int = 2048, **more: object) -> StepInputs:
    return StepInputs(
        model,
        load_cluster("h100-sxm8").with_nodes(1),
        Layout.parse("ep=8,dp=8"),
        Job(seq, 1, 16),
        recipe=with_dispatch(Recipe(), dispatch),
        perturbation=Perturbation.parse(text),
    )


def run(*args: object, **more: object) -> StepResult:
    return simulate_step(step(*args, **more), ranges=False)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=25)
@given(st.floats(0, 6), st.floats(0.02, 4), st.sampled_from((QWEN, MIXTRAL, TOP1)))
@example(0.0, 0.02, QWEN)
def test_mfu_falls_with_the_exponent(exponent: float, more: float, model: ModelSpec) -> None:
    """Padding to tiles may win a wave back where the fullest rank gets a row or two more: no more than 0.5 %."""
    even, skewed = (run(f"routing=zipf:{e}", model) for e in (exponent, exponent + more))
    assert skewed.mfu <= even.mfu * 1.005
    assert skewed.fullest.total_bytes >= even.fullest.total_bytes * 0.999


def test_mfu_falls_over_a_ladder_of_exponents() -> None:
    found = [run(f"routing=zipf:{e}").mfu for e in (0, 0.1, 0.3, 0.6, 1, 1.5, 3)]
    assert found == sorted(found, reverse=True) and found[-1] < 0.6 * found[0]


@pytest.mark.parametrize("dispatch", DISPATCHERS)
def test_one_expert_receives_everything(dispatch: str) -> None:
    """The fullest rank has what all have together: eight times the even share, and at most eight times the time."""
    experts = TOP1.layers[0].mlp.num_experts  # type: ignore[union-attr]
    text = "routing=counts:" + ":".join(["0"] * (experts - 1) + ["7"])
    even, all_one = run("", TOP1, dispatch), run(text, TOP1, dispatch)
    assert expert_load(step(text, TOP1)) == 8.0
    assert even.step_time_s < all_one.step_time_s < 8 * even.step_time_s
    assert 0 < all_one.mfu < even.mfu
    growth = all_one.fullest.activations - even.fullest.activations
    assert growth > 0 and all_one.fullest.parameters == even.fullest.parameters
    (said,) = (f for f in all_one.findings if f.code == "routing_skewed")
    assert "8 times the even share" in said.message


def test_skew_can_exceed_memory_and_says_so() -> None:
    # Short enough to fit when even.
    model = replace(load_preset("qwen3-30b-a3b"), layers=load_preset("qwen3-30b-a3b").layers[:6])
    even, skewed = (step(text, model, seq=16384) for text in ("", "routing=zipf:8"))
    assert memory_shortfall(even, simulate_step(even, ranges=False).memory) is None
    result = simulate_step(skewed, ranges=False)
    shortfall = memory_shortfall(skewed, result.memory)
    assert shortfall is not None and "does not fit" in shortfall


def test_capacity_of_a_device_keeps_more_than_that_of_an_expert_and_bounds_the_step() -> None:
    layer = QWEN.layers[0]
    model = replace(QWEN, layers=(replace(layer, mlp=replace(layer.mlp, capacity_factor=1.0)),) * 2)
    text = "routing=zipf:1"
    free, expert, device = (
        run(text, m, f"all_to_all:capacity={per}")
        for m, per in ((QWEN, "expert"), (model, "expert"), (model, "device"))
    )
    assert expert.step_time_s <= device.step_time_s * 1.02 and device.step_time_s < free.step_time_s
    balanced = run(text, QWEN, "all_to_all:balanced=true")
    # Ranks are even then; what is left is padding of uneven experts.
    assert expert_load(step(text, QWEN, "all_to_all:balanced=true")) == pytest.approx(1.0, abs=0.01)
    assert run("").step_time_s * 0.99 < balanced.step_time_s < 1.1 * run("").step_time_s


def test_findings() -> None:
    assert [f.code for f in routing_findings(step())] == ["routing_assumed"]
    assert [f.code for f in routing_findings(step("routing=zipf:0"))] == ["routing_assumed"]
    (asked,) = routing_findings(step("imbalance=1.3"))
    assert "1.3 times the even share" in asked.message and "same number" not in asked.message
    assert [f.code for f in routing_findings(step("routing=zipf:1", dispatch="deepep:dtype=fp8"))] == [
        "routing_skewed",
        "accuracy_affecting",
    ]
    dense = gpt(num_layers=2, hidden=1024, num_heads=16, vocabulary=51200, max_positions=2048)
    plain = replace(step("routing=zipf:1"), model=dense, layout=Layout.parse("dp=8"))
    assert [f.code for f in routing_findings(plain)] == ["imbalance_not_applied"]


@pytest.mark.parametrize(
    ("dispatch", "part"),
    [
        ("all_to_all:sms=20", "node_limit and sms"),
        ("all_to_all:balanced=true", "routing is even"),
        ("deepep:capacity=device", "no capacity factor"),
    ],
)
def test_options_that_change_nothing_are_said(dispatch: str, part: str) -> None:
    (said,) = (f for f in routing_findings(step(dispatch=dispatch)) if f.code == "dispatch_option_not_applied")
    assert part in said.message
    assert not [f for f in routing_findings(step(dispatch="deepep:sms=20")) if f.code == said.code]


def test_compute_runs_under_the_flight_of_low_latency() -> None:
    """Issue, flight and receive are parts: what is launched between them costs nothing while the flight lasts."""
    prices = machine_prices(load_cluster("h800-sxm8").with_nodes(4), Layout(ep=32, dp=32))
    size = 128 * 8 * 7408.0
    gemm = GemmOp(2048, 2048, 2048, name="moe.shared.fc1")

    def seconds(method: RouteMethod, *, between: bool) -> float:
        route = Route(method, 8, 256, 0, DEFAULT_SMS[method])
        issue = KernelOp(MemoryOp("quantize_fp8", 128, 7168), "moe.dispatch")
        flight = CollectiveOp("all_to_all", size, 32, name="moe.dispatch", group="ep", route=route)
        receive = KernelOp(MemoryOp("copy", 1024, 7168, "fp8"), "moe.dispatch")
        operators = (issue, flight, gemm, receive) if between else (issue, flight, receive, gemm)
        at = operators.index(receive)
        graph = OperatorGraph(
            operators,
            tuple(sorted({(0, 1), (1, at)})),
            tuple("flight" if op is flight else COMPUTE for op in operators),
        )
        return simulate_piece(Context(graph, prices), Composition(), follows=False).duration_s

    hidden = seconds("low_latency", between=False) - seconds("low_latency", between=True)
    assert hidden == pytest.approx(prices.operator_s(gemm), rel=0.05)
    # A kernel on SMs of its own slows what runs beside it.
    assert seconds("deepep", between=False) - seconds("deepep", between=True) < 0.97 * hidden


def test_low_latency_holds_a_row_for_every_token_and_expert() -> None:
    """DeepEP asks for 1.75 GiB at 128 tokens of DeepSeek-V3: right for decoding, out of the question in training."""
    even, latency = (simulate_step(step(dispatch=name), ranges=False).fullest for name in ("", "deepep_low_latency"))
    rows = 4 * 128 * 2048
    assert latency.buffers - even.buffers == pytest.approx(rows * (2 * QWEN.hidden + 16))
    assert latency.activations == even.activations


def test_queues_decide_what_runs_beside_an_exchange() -> None:
    pairs = replace(step(), schedule="interleaved_pairs", layout=Layout.parse("ep=4,pp=2,vpp=2,dp=4"), model=FOUR)
    times = [simulate_step(with_queues(pairs, n), ranges=False).step_time_s for n in (1, 2, 32, None)]
    assert times[0] > times[2] == times[3] and times[0] >= times[1] >= times[2]
    with pytest.raises(UsageError, match="at least 1"):
        with_queues(pairs, 0)


def test_imbalance_and_routing_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="expected one of them"):
        Perturbation.parse("imbalance=1.5,routing=zipf:1")
    with pytest.raises(UsageError, match="routing is given twice"):
        Perturbation.parse("routing=zipf:1,routing=zipf:2")
    text = "jitter=0.05,routing=zipf:0.75,seed=3"
    assert str(Perturbation.parse(text)) == text


def test_what_changes_nothing_without_experts_is_said() -> None:
    dense = gpt(num_layers=2, hidden=1024, num_heads=16, vocabulary=51200, max_positions=2048)
    inputs = replace(step("routing=zipf:1", dispatch="deepep"), model=dense, layout=Layout(dp=8))
    assert expert_load(inputs) == 1
    codes = {finding.code for finding in simulate_step(inputs, ranges=False).findings}
    assert {"imbalance_not_applied", "dispatch_option_not_applied"} <= codes


@pytest.mark.parametrize("dispatch", ["hierarchical:sms=4", "deepep_low_latency:sms=4", "all_to_all:sms=4"])
def test_sms_that_no_kernel_holds_are_said(dispatch: str) -> None:
    assert "dispatch_option_not_applied" in [finding.code for finding in routing_findings(step(dispatch=dispatch))]
    plain = step(dispatch=dispatch.partition(":")[0])
    assert "dispatch_option_not_applied" not in [finding.code for finding in routing_findings(plain)]


def test_an_imbalance_that_no_routing_has_is_said() -> None:
    def codes(text: str) -> list[str]:
        return [finding.code for finding in routing_findings(step(text, MIXTRAL))]

    assert "imbalance_beyond_routing" not in codes("imbalance=4")
    assert "imbalance_beyond_routing" in codes("imbalance=4.1")
    # The most skewed routing reaches the limit.
    assert expert_load(step("routing=zipf:60", MIXTRAL)) == pytest.approx(fullest_possible(MIXTRAL.layers[0].mlp, 8))
