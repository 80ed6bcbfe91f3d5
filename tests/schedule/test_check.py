"""The compiled check and the sentences of `faults` are one set of rules: what one passes the other does."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from overlapsim.errors import ProgramError
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.faults import refuse_faults, refuse_wrong_form
from overlapsim.schedule.kernel_check import content_is_fine
from overlapsim.schedule.program import Program, validate_program
from overlapsim.testing.programs import random_program
from tests.schedule.test_program import BAD_FIELDS, changed, small_program

ODD = (-(2**63), -(2**46), -2, -1, 0, 1, 2, 3, 5, 2**46, 2**46 + 1, 2**62, 2**63 - 1)
ODD_FLOATS = (-np.inf, -1.0, -0.0, 0.0, 5e-324, 0.5, 1.0, 1.5, 1e300, np.inf, np.nan)


def refused(program: Program) -> str:
    """Message of the sentences, empty if they refuse nothing."""
    try:
        with np.errstate(all="ignore"):
            refuse_faults(program)
    except ProgramError as error:
        return str(error)
    return ""


def disturbed(program: Program, rng: np.random.Generator) -> Program:
    """The program with an entry or two of some arrays replaced: odd values, or values of other rows."""
    arrays = [spec.name for spec in fields(program) if isinstance(getattr(program, spec.name), np.ndarray)]
    values: dict[str, Any] = {}
    for name in rng.choice(arrays, rng.integers(1, 3), replace=False).tolist():
        array = getattr(program, name).copy()
        if len(array) == 0:
            continue
        odd = {"i": ODD, "f": ODD_FLOATS, "b": (False, True)}[array.dtype.kind]
        for place in rng.integers(0, len(array), rng.integers(1, 3)).tolist():
            other = array[rng.integers(0, len(array))]
            array[place] = other if rng.random() < 0.5 else odd[rng.integers(0, len(odd))]
        values[name] = array
    return replace(program, **values)


@pytest.mark.parametrize("seed", range(8))
def test_check_and_sentences_agree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    messages = set()
    for number in range(250):
        program = disturbed(random_program(1000 * seed + number % 40), rng)
        message = refused(program)
        # A queue or group with a far number is left to the sentences.
        numbers = np.concatenate([program.stream_queue, program.group])
        unsure = numbers.min() < -(2**40) or numbers.max() > 2**40
        if not unsure or message:
            assert content_is_fine(program) == (not message), message or "the check refuses what the sentences pass"
        messages.add(message.split(": ")[-1].split(";")[0])
    assert len(messages) > 15  # or little was tried


@pytest.mark.parametrize(("name", "where", "value", "message"), BAD_FIELDS)
def test_check_passes_nothing_that_is_refused(name: str, where: int, value: Any, message: str) -> None:
    program = changed(name, where, value)
    refuse_wrong_form(program)
    assert message in refused(program)
    assert not content_is_fine(program)


def test_check_passes_what_is_valid() -> None:
    """Or every program would be checked twice."""
    for seed in range(200):
        assert content_is_fine(random_program(seed))
    assert content_is_fine(small_program())
    assert content_is_fine(ProgramBuilder().freeze())


@pytest.mark.parametrize("queues", [(2**62, -(2**62), 2**62), (10**12, 5, 5)])
def test_queues_may_have_any_numbers(queues: tuple[int, ...]) -> None:
    b = ProgramBuilder()
    gpu = b.add_pool(2)
    for queue in queues:
        b.add_blocks(stream=b.add_stream(queue=queue), pool=gpu, units=1, unit_ps=1, sm=1)
    assert b.freeze().is_validated
    b.add_blocks(stream=b.add_stream(queue=queues[-1]), pool=gpu, units=1, unit_ps=1, sm=1, host=1)
    with pytest.raises(ProgramError, match="tasks 2 and 3 share a queue"):
        b.freeze()


def test_groups_may_have_any_numbers() -> None:
    def program(last_units: int) -> Program:
        b = ProgramBuilder()
        gpu = b.add_pool(2)
        for group, units in ((2**62, 3), (7, 2), (2**62, last_units)):
            b.add_flow(stream=b.add_stream(), pool=gpu, units=units, unit_ps=1, sm=0, group=group)
        return b.freeze()

    assert program(3).is_validated
    with pytest.raises(ProgramError, match=f"tasks 0 and 2 are in group {2**62} with different units"):
        program(4)


def test_the_clock_may_be_full_to_the_brim() -> None:
    b = ProgramBuilder()
    b.add_blocks(stream=b.add_stream(), pool=b.add_pool(1), units=2**16, unit_ps=2**46, sm=1)
    assert b.freeze().is_validated
    b.add_blocks(stream=0, pool=0, units=1, unit_ps=2**20, sm=1)
    with pytest.raises(ProgramError, match="the clock holds"):
        b.freeze()


def test_a_changed_copy_is_not_validated() -> None:
    program = small_program()
    assert program.is_validated
    copy = replace(program, units=program.units)
    assert not copy.is_validated
    validate_program(copy)
    assert copy.is_validated


def test_arrays_of_a_program_are_plain_whatever_was_given() -> None:
    """In order and read-only, also after a trip to another process: engines are compiled for that."""
    program = small_program()
    backwards = replace(program, unit_ps=program.unit_ps[::-1].copy()[::-1])
    unaligned = np.frombuffer(b"x" + program.unit_ps.tobytes(), np.int64, offset=1)
    for same in (backwards, replace(program, unit_ps=unaligned), pickle.loads(pickle.dumps(program))):
        assert same == program
        assert same.unit_ps.flags.c_contiguous
        assert same.unit_ps.flags.aligned
        assert not same.unit_ps.flags.writeable
        validate_program(same)


def test_to_build_a_program_needs_no_compiler() -> None:
    code = (
        "import sys; from overlapsim.schedule.builder import ProgramBuilder; b = ProgramBuilder(); b.add_pool(1)\n"
        "print('numba' in sys.modules); b.freeze(); print('numba' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", "True"]
