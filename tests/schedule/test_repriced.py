"""Program.repriced: the same structure with other durations and amounts."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from overlapsim.errors import ProgramError
from overlapsim.schedule.program import HOST, Program, validate_program
from overlapsim.testing.programs import random_program
from tests.schedule.test_program import small_program

DERIVED = (
    "stream_tasks", "task_queue", "queue_tasks", "task_lane", "lane_tasks", "task_runner_group", "group_members",
    "edges_out", "edges_in",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_program_made_anew(seed: int) -> None:
    program = random_program(seed)
    digest = program.digest
    rng = np.random.default_rng(seed)
    unit_ps = rng.integers(1, 1000, program.num_tasks)
    amount = rng.uniform(1, 9, len(program.demand_amount))
    assert program.repriced(unit_ps, amount) == replace(program, unit_ps=unit_ps, demand_amount=amount)
    assert program.repriced(unit_ps) == replace(program, unit_ps=unit_ps)
    assert program.repriced(program.unit_ps, program.demand_amount) == program
    assert program.digest == digest
    validate_program(program.repriced(unit_ps, amount))


def test_shares_all_else() -> None:
    program = small_program()
    derived = {name: getattr(program, name) for name in DERIVED}
    other = program.repriced(program.unit_ps + 1)
    for spec in fields(Program):
        if spec.name != "unit_ps":
            assert getattr(other, spec.name) is getattr(program, spec.name)
    for name, value in derived.items():
        assert vars(other)[name] is value
    assert other.is_validated
    assert other.repriced(program.unit_ps).structure is other.structure is program
    assert program.structure is program
    assert replace(other, host=program.host).structure is not program
    sent = pickle.loads(pickle.dumps(other))
    assert sent == other
    assert sent.structure is sent


def test_keeps_arrays_of_its_own() -> None:
    program = small_program()
    unit_ps, amount = program.unit_ps.copy(), program.demand_amount.copy()
    other = program.repriced(unit_ps, amount)
    unit_ps[0] = amount[0] = 7
    assert other == program
    assert not other.unit_ps.flags.writeable
    assert not other.demand_amount.flags.writeable


WRONG: list[tuple[Any, Any, str]] = [
    ([0, 40, 50, 0, 100], None, "task 0: unit_ps must be 1 .. 2^46 (HOST from 0); given 0"),
    ([100, 40, 50, -1, 100], None, "task 3: unit_ps must be 1 .. 2^46 (HOST from 0); given -1"),
    ([100, 40, 50, 2**46 + 1, 100], None, "task 3: unit_ps must be 1 .. 2^46"),
    ([100, 40, 50, 0], None, "unit_ps has 4 entries for 5 tasks; they must agree"),
    ([100.0, 40, 50, 0, 100], None, "unit_ps must be a 1-d array of int64; given 1-d float64"),
    ([[100], [40], [50], [0], [100]], None, "unit_ps must be a 1-d array of int64; given 2-d int64"),
    (None, [50.0, 1.0, 0.0], "demand 2: amount must be positive and finite; given 0.0"),
    (None, [50.0, 1.0, np.nan], "demand 2: amount must be positive and finite; given nan"),
    (None, [50.0, np.inf, 8.0], "demand 1: amount must be positive and finite; given inf"),
    (None, [50.0, 8.0], "demand_amount has 2 entries for 3 demands; they must agree"),
    (None, [50, 1, 8], "demand_amount must be a 1-d array of float64; given 1-d int64"),
]


@pytest.mark.parametrize(("unit_ps", "amount", "message"), WRONG)
def test_refuses_what_validate_program_refuses(unit_ps: Any, amount: Any, message: str) -> None:
    program = small_program()
    unit_ps = program.unit_ps if unit_ps is None else np.array(unit_ps)
    amount = None if amount is None else np.array(amount)
    with pytest.raises(ProgramError) as error:
        program.repriced(unit_ps, amount)
    assert message in str(error.value)


def test_refuses_more_than_the_clock_holds() -> None:
    """Each duration alone is fine: launches, lags and units count, as in a program made anew."""
    program = small_program()
    many = replace(program, units=np.where(program.kind == HOST, 1, 2**14), edge_src_units=program.edge_src_units)
    with pytest.raises(ProgramError, match="the clock holds"):
        many.repriced(np.full(program.num_tasks, 2**46))
    many.repriced(np.full(program.num_tasks, 2**45))


def test_of_a_program_not_validated_is_not_validated() -> None:
    program = replace(small_program(), sm=np.array([9, 9, 9, 9, 9]))
    other = program.repriced(program.unit_ps)
    assert not other.is_validated
    with pytest.raises(ProgramError, match="sm of BLOCKS"):
        validate_program(other)
