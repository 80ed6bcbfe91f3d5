"""A graph recorded operator by operator: what needs what, and on which stream."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.operators import CollectiveOp
from overlapsim.workload.recorder import Recorder

NORM = MemoryOp("rmsnorm", 8, 8)


def test_each_needs_the_one_before() -> None:
    r = Recorder("fwd", "fp16")
    r.kernel("attn.norm", NORM)
    r.gemm("attn.qkv", 64, 32, 16)
    r.collective("all_reduce", "attn.out", 4096.0, 4, group="tp")
    graph = r.graph()
    assert graph.dependencies == ((0, 1), (1, 2))
    assert {op.pass_ for op in graph.operators} == {"fwd"}
    assert [op.dtype for op in graph.operators[1:]] == ["fp16", "fp16"]
    assert graph.operators[2] == CollectiveOp("all_reduce", 4096.0, 4, "fp16", "attn.out", "fwd", group="tp")


def test_beside_the_main_line_and_joined_again() -> None:
    """An operator off the main line is needed by nobody until `also` says so."""
    r = Recorder("dgrad")
    first = r.gemm("mlp.fc1", 8, 8, 8)
    beside = r.collective("all_gather", "mlp.fc1", 64.0, 2, stream="tp", needs=[first], main=False)
    second = r.gemm("mlp.fc1", 8, 8, 8, pass_="wgrad")
    r.also(beside)
    third = r.kernel("mlp.norm", NORM)
    graph = r.graph()
    assert (r.last, len(r)) == (third, 4)
    assert graph.producers(second) == (first,)
    assert graph.producers(third) == (beside, second)
    assert [graph.stream_of(i) for i in range(4)] == ["compute", "tp", "compute", "compute"]
    assert [op.pass_ for op in graph.operators] == ["dgrad", "dgrad", "wgrad", "dgrad"]


def test_one_rank_moves_nothing() -> None:
    """A collective over one rank is left out, and what comes after needs what was before."""
    r = Recorder("fwd")
    first = r.gemm("mlp.fc2", 8, 8, 8)
    assert r.collective("all_reduce", "mlp.fc2", 64.0, 1) == first
    r.also(r.collective("all_reduce", "mlp.fc2", 64.0, 1, main=False))
    r.kernel("mlp.norm", NORM)
    assert r.graph().dependencies == ((0, 1),)


def test_also_before_anything_asks_for_nothing() -> None:
    r = Recorder("fwd")
    r.also(-1)
    r.kernel("mlp.norm", NORM)
    assert r.graph().dependencies == ()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3)), max_size=12))
def test_dependencies_rise_and_are_there_once(steps: list[tuple[bool, int]]) -> None:
    """Whatever is recorded is a sound graph; the main line is a chain."""
    r, main = Recorder("fwd"), []
    for on_main, ranks in steps:
        before = len(r)
        r.collective("all_reduce", "mlp.fc2", 64.0, ranks, main=on_main, needs=None if on_main else [r.last])
        if on_main and len(r) > before:
            main.append(before)
    graph = r.graph()
    assert len(set(graph.dependencies)) == len(graph.dependencies)
    assert all(src < dst for src, dst in graph.dependencies)
    assert all((a, b) in graph.dependencies for a, b in pairwise(main))
