"""What packing sorts with, what repriced programs share, and that nothing invalid is packed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from overlapsim.engine import reference
from overlapsim.engine.compiled import run
from overlapsim.engine.kernel_order import SHORT, dense, grouped, grouped_and_sorted
from overlapsim.engine.kernel_pack import pack, packed
from overlapsim.errors import ProgramError
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import HOST, Incidence, Program
from overlapsim.testing.programs import random_program
from tests.engine.golden import GOLDEN
from tests.engine.test_agreement import differences

EXTREMES = (-(2**63), 2**63 - 1)


@pytest.mark.parametrize("limits", [(-3, 4), (0, 200), (-(2**60), 2**60), EXTREMES])
def test_dense_against_numpy(limits: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    for size in (0, 1, 2, 7, 40, 300):
        values = rng.integers(*limits, size)
        values[size // 2 :] = values[: size - size // 2]
        distinct, expected = np.unique(values, return_inverse=True)
        number, count = dense(values)
        assert number.tolist() == expected.tolist()
        assert count == len(distinct)


@pytest.mark.parametrize("limits", [(0, 1), (0, 5), (-1, 1000), EXTREMES])
@pytest.mark.parametrize("num_rows", [1, 2, 30])
def test_rows_are_sorted_and_stable(num_rows: int, limits: tuple[int, int]) -> None:
    rng = np.random.default_rng(2)
    for size in (0, 1, SHORT, SHORT + 1, 20 * SHORT):
        key, value = rng.integers(0, num_rows, size), rng.integers(*limits, size)
        for order in (value, np.sort(value), np.sort(value)[::-1].copy()):
            expected = Incidence.by_key(key, num_rows, order)
            ptr, index = grouped_and_sorted(key, num_rows, order)
            assert ptr.tolist() == expected.ptr.tolist()
            assert index.tolist() == expected.index.tolist()


def test_grouped_keeps_the_order_before_and_takes_a_part() -> None:
    ptr, index = grouped(np.array([1, 0, 9, 1, 0]), 3, np.array([4, 3, 1, 0]))
    assert ptr.tolist() == [0, 2, 4, 4]
    assert index.tolist() == [4, 1, 3, 0]


def test_tables_agree_with_the_incidences_of_the_program() -> None:
    """The packer sorts for itself: what it finds is what the Program says of itself."""
    for seed in range(100):
        program = random_program(seed)
        tables = packed(program)
        assert tables.edge[:, 0].tolist() == program.edge_src_units[program.edges_out.index].tolist()
        assert tables.gate[:, 0].tolist() == program.edge_dst_unit[program.edges_in.index].tolist()
        assert tables.lane.tolist() == program.lane_tasks.index[program.lane_tasks.ptr[:-1]].tolist()
        groups = program.group_members
        blocks = int((program.kind == 0).sum())
        assert len(tables.runner) == blocks + len(groups.ptr) - 1
        finite = np.isfinite(program.resource_capacity)
        assert (tables.demand[:, 0] > 0).all()
        assert set(tables.ask[:, 0].tolist()) == set(np.unique(program.demand_resource)) & set(np.flatnonzero(finite))


@pytest.mark.parametrize("seed", range(60))
def test_a_repriced_program_runs_as_one_made_anew(seed: int) -> None:
    program = random_program(seed)
    rng = np.random.default_rng(seed)
    # Equal times make the ties in which a wrong order shows.
    unit_ps = rng.choice(program.unit_ps, program.num_tasks) + (program.kind != HOST)
    amount = program.demand_amount * rng.choice([0.5, 1.0, 1 / 3], len(program.demand_amount))
    anew = replace(program, unit_ps=unit_ps, demand_amount=amount)
    expected = run(anew, record=True)
    # Whether or not the original was packed before.
    for other in (program.repriced(unit_ps, amount), program.repriced(unit_ps, amount)):
        assert not differences(run(other, record=True), expected)
        for mine, theirs in zip(packed(other), pack(anew), strict=True):
            assert np.array_equal(mine, theirs)
        assert packed(other).edge is packed(program).edge
    assert not differences(run(program, record=True), reference.run(program, record=True))


def test_repriced_golden_programs_twice() -> None:
    for case in GOLDEN:
        program = case.build()
        twice = program.repriced(program.unit_ps * 3).repriced(program.unit_ps)
        assert not differences(
            run(twice, contention=case.contention, record=True), run(program, contention=case.contention, record=True)
        )


def kernel() -> Program:
    b = ProgramBuilder()
    gpu = b.add_pool(4)
    first, second = (b.add_blocks(stream=b.add_stream(), pool=gpu, units=9, unit_ps=10, sm=2) for _ in range(2))
    b.add_edge(first, second)
    return b.freeze()


@pytest.mark.parametrize(("name", "value"), [("edge_dst", [10**9]), ("stream", [0, -7]), ("pool", [3, 0])])
def test_an_invalid_program_is_refused_before_anything_runs(name: str, value: list[int]) -> None:
    """Compiled code would read and write wherever the number points."""
    program = replace(kernel(), **{name: np.array(value)})
    for one in (program, program.repriced(program.unit_ps)):
        with pytest.raises(ProgramError, match="does not exist"):
            run(one)


def test_a_valid_copy_runs() -> None:
    assert run(replace(kernel(), launch_ps=np.array([5, 0]))).t_end.tolist() == [55, 105]
