"""Operators refuse what cannot be computed and size their collectives as nccl-tests does."""

from __future__ import annotations

import pytest

from overlapsim.errors import UsageError, WorkloadError
from overlapsim.workload.operators import CollectiveOp, GemmOp, OperatorGraph, gemm_and_collective


def test_flop_and_bytes() -> None:
    op = GemmOp(8192, 4096, 2048, "fp16")
    assert op.flop == 2 * 8192 * 4096 * 2048
    assert op.output_bytes == 8192 * 4096 * 2
    assert op.operand_bytes == (8192 + 4096) * 2048 * 2


def test_collective_is_sized_by_the_output() -> None:
    graph = gemm_and_collective(GemmOp(64, 32, 16, "fp32"), "reduce_scatter", 4)
    assert graph.operators[1] == CollectiveOp("reduce_scatter", 64 * 32 * 4, 4, "fp32")
    assert graph.dependencies == ((0, 1),)


@pytest.mark.parametrize("field", ["m", "n", "k"])
@pytest.mark.parametrize("value", [0, -1, 2**31])
def test_sizes(field: str, value: int) -> None:
    with pytest.raises(WorkloadError, match=f"{field} is {value}"):
        GemmOp(**{"m": 1, "n": 1, "k": 1, field: value})


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"dtype": "half"}, UsageError),
        ({"accumulate": "bf16"}, WorkloadError),
        ({"name": "attn.foo"}, WorkloadError),
        ({"pass_": "backward"}, WorkloadError),
    ],
)
def test_names(arguments: dict[str, str], error: type[Exception]) -> None:
    with pytest.raises(error, match="expected"):
        GemmOp(1, 1, 1, **arguments)


def test_model_operators_have_fixed_names() -> None:
    assert GemmOp(1, 1, 1, name="moe.shared.fc1", pass_="wgrad").name == "moe.shared.fc1"


@pytest.mark.parametrize(
    "arguments", [("all_sum", 1.0, 2), ("all_reduce", 0.0, 2), ("all_reduce", float("nan"), 2), ("all_reduce", 1.0, 0)]
)
def test_collectives(arguments: tuple[str, float, int]) -> None:
    with pytest.raises(WorkloadError, match="expected"):
        CollectiveOp(*arguments)


def test_dependencies_rise() -> None:
    op = GemmOp(1, 1, 1)
    with pytest.raises(WorkloadError, match="does not rise"):
        OperatorGraph((op, op), ((1, 0),))
