"""The suite can fail: for every rule of docs/program.md section 3, an engine that breaks it is caught.

Each mutant, one edit of one engine, runs the golden, the directed and then random programs against the
other engine as it is, until one differs.  A mutant that nothing catches shows a hole in the suite.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from overlapsim.engine import compiled, reference
from overlapsim.engine.timeline import Timeline
from overlapsim.schedule.program import Program
from overlapsim.testing.programs import random_program
from tests.engine import mutations_compiled, mutations_reference
from tests.engine.golden import GOLDEN
from tests.engine.mutants import Mutation, loaded
from tests.engine.test_agreement import differences
from tests.engine.test_directed import CASES

NUM_RANDOM = 300
MUTATIONS = (*mutations_reference.MUTATIONS, *mutations_compiled.MUTATIONS)
OTHER = {"reference": compiled.run, "compiled": reference.run}
SECTIONS = ("1", "3.1", "3.2", "3.3", "3.4", "3.5", "3.6")


class _EndlessError(Exception):
    """A mutant that does not come to an end; that is a difference too."""


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Raise _EndlessError after a time that no healthy run comes near; without signals there is no limit."""

    def stop(_: int, __: FrameType | None) -> None:
        raise _EndlessError

    if not hasattr(signal, "SIGALRM"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@cache
def suite() -> tuple[tuple[str, Program, bool], ...]:
    """Kind of program, the program, contention."""
    golden = [("golden", case.build(), case.contention) for case in GOLDEN]
    hand = [case() for case in CASES]
    directed = [("directed", case.program, case.contention) for case in hand]
    # Seeds that the agreement tests do not use.
    drawn = [("random", random_program(2_000_000 + seed), seed % 8 != 0) for seed in range(NUM_RANDOM)]
    return (*golden, *directed, *drawn)


@cache
def expected(engine: str) -> tuple[Timeline, ...]:
    """What the unmutated other engine gives."""
    return tuple(OTHER[engine](program, contention=contention, record=True) for _, program, contention in suite())


def first_difference(run: Callable[..., Timeline], engine: str) -> str | None:
    """Kind of the first program on which `run` differs from the other engine; a failing run differs."""
    for (kind, program, contention), other in zip(suite(), expected(engine), strict=True):
        try:
            with np.errstate(all="ignore"):
                mine = run(program, contention=contention, record=True)
        except (NameError, AttributeError, TypeError):
            raise  # the edit is no Python that could run
        except Exception:
            return kind
        if differences(mine, other):
            return kind
    return None


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["reference", "compiled"])
def test_no_edit_no_difference(engine: str, tmp_path: Path) -> None:
    """The copies themselves agree; so a caught mutant was caught for its edit."""
    with loaded(engine, None, tmp_path) as run:
        assert first_difference(run, engine) is None


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=[f"{m.engine}: {m.rule}" for m in MUTATIONS])
def test_caught(mutation: Mutation, tmp_path: Path, record_property: Callable[[str, Any], None]) -> None:
    with loaded(mutation.engine, mutation, tmp_path) as run:
        try:
            with _limit(60):
                caught = first_difference(run, mutation.engine)
        except _EndlessError:
            caught = "endless"
    record_property("mutation caught by", f"{mutation.engine}: {caught}")
    assert caught is not None, f"nothing differs without rule {mutation.rule!r} ({mutation.file}): {mutation.new}"


@pytest.mark.parametrize("engine", ["reference", "compiled"])
def test_every_section_is_covered(engine: str) -> None:
    rules = [mutation.rule for mutation in MUTATIONS if mutation.engine == engine]
    assert {rule.split()[0] for rule in rules} >= set(SECTIONS)
    assert len(set(rules)) == len(rules)
