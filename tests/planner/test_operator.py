"""The operator planner: baseline, verdict and cause, ranges, bounds, plans that simulate to the same numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.errors import PlanError, UsageError
from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import OperatorInputs, dump_plan, load_plan
from overlapsim.planner.operator import QUICK, OperatorResult, plan_operator, seconds_of, simulate
from overlapsim.planner.operator_plan import context_from, replay, to_plan
from overlapsim.strategy.registry import load_strategies
from tests.planner.published_prices import published_context

STRATEGIES = load_strategies(("serial", "wave_group"))
MAIN = OperatorInputs("a800-sxm8", "", 1, 2, 8192, 8192, 4096, "fp16", "fp16", "all_reduce")


def plan(inputs: OperatorInputs) -> OperatorResult:
    return plan_operator(context_from(inputs, load_cluster(inputs.cluster)), STRATEGIES)


def test_published_case_overlaps() -> None:
    result = plan_operator(published_context(8192, 2.3613457679748535e-3), STRATEGIES, contention=False)
    assert result.verdict == "overlap"
    assert result.cause == "none"
    assert result.best.strategy.name == "wave_group"
    # Stolen SMs arrive as CTAs retire: later than the published recurrence assumes, and nearer to what was measured.
    assert 2.5491e-3 <= result.best.best.predicted_s <= 2.695e-3


def test_ceiling_and_baseline_come_from_the_best_serial_kernels() -> None:
    """Case A15: the vendor library takes 7.59 + 0.29 ms, the signalled kernel 11.25 ms."""
    inputs = replace(
        MAIN, cluster="h100-sxm8", ranks=2, m=4096, n=12288, k=49152, gemm_time_s=7.59e-3,
        kernel_time_s={"wave_group": 11.25e-3}, accumulate="fp32",
    )  # fmt: skip
    result = plan(inputs)
    assert result.verdict == "serial"
    assert result.cause == "kernel_slower"
    assert result.best is result.serial
    assert result.ceiling == pytest.approx(result.serial.prediction.value_s / 7.59e-3)


def test_one_wave_is_serial() -> None:
    result = plan(replace(MAIN, cluster="rtx4090-pcie8", ranks=4, m=64, n=8192, k=7168))
    assert (result.verdict, result.cause) == ("serial", "under_one_wave")
    assert not result.results[1].applicability.applies


def test_nothing_to_hide() -> None:
    """A GEMM that dwarfs its collective cannot gain 2 %."""
    result = plan(replace(MAIN, m=8192, n=1024, k=2**20))
    assert result.ceiling < 1.02
    assert result.verdict in ("serial", "tie")
    assert result.cause == "little_to_hide"


@settings(deadline=None, max_examples=25)
@given(
    cluster=st.sampled_from(["a800-sxm8", "h100-sxm8", "rtx4090-pcie8"]),
    ranks=st.sampled_from([2, 3, 8]),
    m=st.integers(1, 20000),
    n=st.integers(1, 20000),
    k=st.integers(1, 20000),
)
def test_any_shape_is_answered_within_bounds(cluster: str, ranks: int, m: int, n: int, k: int) -> None:
    result = plan(replace(MAIN, cluster=cluster, ranks=ranks, m=m, n=n, k=k, accumulate="fp32"))
    assert result.ceiling >= 1
    for entry in result.results:
        if entry.prediction is None:
            assert entry.applicability.reasons
            continue
        assert entry.prediction.low_s <= entry.prediction.value_s <= entry.prediction.high_s
        assert entry.prediction.value_s >= result.lower_bound_s
        assert entry.speedup_low <= entry.speedup <= entry.speedup_high
    assert result.best.prediction.value_s <= result.serial.prediction.value_s
    assert (result.cause == "none") == (result.verdict == "overlap") or result.verdict == "tie"


def test_same_inputs_same_bytes_and_the_plan_simulates_to_its_numbers() -> None:
    cluster = load_cluster("a800-sxm8")
    inputs = replace(MAIN, cluster_sha256=cluster.digest)
    text = dump_plan(to_plan(plan(inputs), inputs, {}))
    assert text == dump_plan(to_plan(plan(inputs), inputs, {}))
    content = load_plan(text)
    again = replay(content, cluster)
    timeline = simulate(again.strategy, again.context, again.parameters)
    assert timeline.duration_s == content.predictions[again.strategy.name].value_s
    assert again.findings == ()
    stale = replay(replace(content, inputs=replace(content.inputs, cluster_sha256="0")), cluster)
    assert [finding.code for finding in stale.findings] == ["cluster_changed"]


@pytest.mark.parametrize("ranks", [-1, 0, 1, 9, 2**40])
def test_ranks_must_fit_the_cluster(ranks: int) -> None:
    with pytest.raises(UsageError, match="expected 2 to 8"):
        context_from(replace(MAIN, ranks=ranks), load_cluster("a800-sxm8"))


def test_a_baseline_is_needed() -> None:
    context = context_from(MAIN, load_cluster("a800-sxm8"))
    with pytest.raises(PlanError, match="serial"):
        plan_operator(context, [s for s in STRATEGIES if s.overlaps])


def test_measured_times_replace_the_model() -> None:
    slow, fast = (plan(replace(MAIN, gemm_time_s=t)).serial.prediction.value_s for t in (3e-3, 2e-3))
    assert slow - fast == pytest.approx(1e-3, rel=1e-6)


def test_launches_of_an_eager_host_decide_where_kernels_are_short() -> None:
    """github.com/ByteDance-Seed/Triton-distributed pull request 166: 0.52 x on 8 GPUs, from Python."""
    inputs = replace(
        MAIN, cluster="h100-sxm8", ranks=8, m=4096, n=4096, k=1024, dtype="bf16", accumulate="fp32",
        collective="reduce_scatter",
    )  # fmt: skip
    cluster, strategies = load_cluster("h100-sxm8"), load_strategies(scope="pair")
    graph, eager = (
        plan_operator(context_from(replace(inputs, stack=stack), cluster), strategies) for stack in ("graph", "eager")
    )
    assert graph.verdict == "overlap"
    assert (eager.best is eager.serial, eager.cause) == (True, "small_message")
    # The host of two kernels runs ahead of them.
    assert eager.serial.prediction.value_s == pytest.approx(graph.serial.prediction.value_s, rel=1e-6)
    told = [{finding.code for finding in result.findings} for result in (graph, eager)]
    assert "host_not_charged" in told[0] and "host_not_charged" not in told[1]
    large = plan_operator(
        context_from(replace(inputs, m=8192, n=8192, k=3696, stack="eager"), cluster), strategies, effort=QUICK
    )
    assert large.verdict == "overlap"
    with pytest.raises(UsageError, match="launch stack 'steam'"):
        context_from(replace(inputs, stack="steam"), cluster)


def test_a_plan_with_launches_simulates_to_its_numbers() -> None:
    cluster = load_cluster("h100-sxm8")
    inputs = replace(
        MAIN, cluster="h100-sxm8", cluster_sha256=cluster.digest, ranks=8, m=2048, n=4096, k=512, stack="eager"
    )
    result = plan_operator(context_from(inputs, cluster), STRATEGIES)
    content = load_plan(dump_plan(to_plan(result, inputs, {})))
    again = replay(content, cluster)
    timeline = simulate(again.strategy, again.context, again.parameters)
    assert again.differences(seconds_of(timeline, again.context)) == ()
    assert timeline.duration_s > 1.5 * again.planned_s


def test_a_faster_transport_alone_is_no_overlap() -> None:
    """Few rows are gathered by the switch before the GEMM: serial execution by another strategy."""
    inputs = replace(
        MAIN, cluster="h100-sxm8", ranks=8, m=256, n=1024, k=4096, dtype="bf16", accumulate="fp32",
        collective="all_gather", stack="eager",
    )  # fmt: skip
    strategies = load_strategies(("serial", "async_tp"))
    result = plan_operator(context_from(inputs, load_cluster("h100-sxm8")), strategies)
    assert (result.verdict, result.best.strategy.name) == ("serial", "async_tp")
    assert result.best.speedup_low > 1


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_no_gain_passes_the_ceiling_of_the_best_transport(kind: str) -> None:
    for name, ranks in (("h100-sxm8", 8), ("l40s-pcie8", 4), ("gb200-nvl72", 16), ("mi300x8", 8)):
        inputs = replace(
            MAIN, cluster=name, ranks=ranks, m=8192, n=8192, k=1024, dtype="bf16", accumulate="fp32", collective=kind
        )
        cluster = load_cluster(name)
        nodes = -(-ranks // cluster.node.num_devices)
        context = context_from(replace(inputs, nodes=nodes), cluster)
        result = plan_operator(context, load_strategies(scope="pair"), effort=QUICK)
        for entry in result.results:
            # Fused kernels may be a little faster than the library's.
            assert entry.speedup <= result.ceiling * 1.05, (name, entry.strategy.name)


@pytest.mark.parametrize("sms", [0, 1, 131, 132])
def test_any_number_of_sms_of_a_collective_is_answered(sms: int) -> None:
    inputs = replace(MAIN, cluster="h100-sxm8", ranks=8, accumulate="fp32", comm_sms=sms, collective="reduce_scatter")
    result = plan_operator(context_from(inputs, load_cluster("h100-sxm8")), load_strategies(scope="pair"), effort=QUICK)
    assert result.ceiling >= 1
    assert ("comm_sms_as_asked" in {finding.code for finding in result.findings}) == (sms < 24)


def test_a_machine_of_few_units_and_one_of_thousands_of_ranks() -> None:
    strategies = load_strategies(scope="pair")
    for name, ranks, nodes in (("tpu-v5p-host4", 4, 1), ("h100-sxm8", 4096, 512)):
        for kind in ("all_reduce", "reduce_scatter", "all_gather"):
            inputs = replace(
                MAIN, cluster=name, ranks=ranks, nodes=nodes, dtype="bf16", accumulate="fp32", collective=kind
            )
            context = context_from(inputs, load_cluster(name))
            result = plan_operator(context, strategies, effort=QUICK)
            assert result.best.prediction is not None
            # Thousands of links that are equally full are one.
            assert len(context.prices.flow(context.pair().collective)[1]) < 100
