"""Sweeps answer as single plans do, in order, in one process or several."""

from __future__ import annotations

import numpy as np
import pytest

from overlapsim.errors import UsageError
from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import OperatorInputs
from overlapsim.planner.operator import QUICK, plan_operator
from overlapsim.planner.operator_plan import context_from
from overlapsim.planner.operator_sweep import Answer, Question, sweep_operators
from overlapsim.strategy.registry import load_strategies
from overlapsim.workload.operators import GemmOp

KINDS = ("all_reduce", "reduce_scatter", "all_to_all")


def questions(count: int, seed: int = 0) -> list[Question]:
    """Random shapes, three collectives and three rank counts each."""
    rng = np.random.default_rng(seed)
    shapes = np.exp2(rng.uniform(8, 14.5, (count, 3))).astype(int)
    return [
        Question(GemmOp(int(m), int(n), int(k)), kind, ranks)
        for m, n, k in shapes
        for kind in KINDS
        for ranks in (2, 4, 8)
    ]


def test_a_point_of_a_sweep_is_the_plan_without_ranges() -> None:
    cluster = load_cluster("a100-sxm8")
    for answer in sweep_operators(cluster, questions(2)):
        op, kind, ranks = answer.question.gemm, answer.question.kind, answer.question.ranks
        inputs = OperatorInputs("a100-sxm8", "", 1, ranks, op.m, op.n, op.k, op.dtype, op.accumulate, kind)
        result = plan_operator(context_from(inputs, cluster), load_strategies(scope="pair"), effort=QUICK)
        assert (answer.verdict, answer.cause, answer.best) == (result.verdict, result.cause, result.best.strategy.name)
        assert answer.serial_s == result.serial.prediction.value_s
        assert answer.best_s == result.best.prediction.value_s


def test_processes_change_nothing() -> None:
    cluster, asked = load_cluster("h800-sxm8"), questions(30)[:260]
    assert sweep_operators(cluster, asked, workers=2) == sweep_operators(cluster, asked)


@pytest.mark.parametrize(("stack", "size_bytes"), [("eager", None), ("graph", 2.0**26)])
def test_launches_and_independent_pairs_are_asked_as_single_plans_are(stack: str, size_bytes: float | None) -> None:
    cluster = load_cluster("h100-sxm8")
    asked = [Question(GemmOp(m, 4096, 1024), "reduce_scatter", 8, size_bytes) for m in (512, 4096)]
    for answer in sweep_operators(cluster, asked, stack=stack):
        op = answer.question.gemm
        inputs = OperatorInputs(
            "h100-sxm8", "", 1, 8, op.m, op.n, op.k, op.dtype, op.accumulate, "reduce_scatter",
            independent_bytes=size_bytes, stack=stack,
        )  # fmt: skip
        result = plan_operator(context_from(inputs, cluster), load_strategies(scope="pair"), effort=QUICK)
        assert (answer.verdict, answer.best_s) == (result.verdict, result.best.prediction.value_s)
        assert answer.serial_s == result.serial.prediction.value_s


def test_too_many_tiles_are_refused() -> None:
    with pytest.raises(UsageError, match="tiles"):
        sweep_operators(load_cluster("h100-sxm8"), [Question(GemmOp(2**31 - 1, 2**20, 64), "all_reduce", 8)])


def test_empty() -> None:
    assert sweep_operators(load_cluster("h800-sxm8"), []) == ()


@pytest.mark.benchmark(group="operator sweep")
def test_bench_nine_thousand_points(benchmark) -> None:
    """1,000 shapes x 3 collectives x 3 rank counts on two processes."""
    cluster, asked = load_cluster("a100-sxm8"), questions(1000)
    sweep_operators(cluster, asked[:128], workers=2)
    answers: tuple[Answer, ...] = benchmark.pedantic(
        sweep_operators, args=(cluster, asked), kwargs={"workers": 2}, rounds=1, iterations=1
    )
    assert len(answers) == 9000
