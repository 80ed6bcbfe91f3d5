"""Both engines give the hand-derived results of the directed programs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from overlapsim.engine import compiled, reference
from overlapsim.engine.timeline import Timeline
from tests.engine import directed_bits, directed_life, directed_speeds, directed_units
from tests.engine.directed import Make

CASES = (*directed_life.CASES, *directed_units.CASES, *directed_speeds.CASES, *directed_bits.CASES)
INSTANTS = ("t_issued", "t_eligible", "t_resident", "t_start", "t_end")


@pytest.mark.parametrize("run", [reference.run, compiled.run], ids=["reference", "compiled"])
@pytest.mark.parametrize("make", CASES, ids=[case.__name__ for case in CASES])
def test_directed(make: Make, run: Callable[..., Timeline]) -> None:
    case = make()
    timeline = run(case.program, contention=case.contention, record=True)
    assert np.stack([getattr(timeline, name) for name in INSTANTS], axis=1).tolist() == case.instants()
    units = case.program.units.tolist()
    assert timeline.progress.tolist() == (units if case.progress is None else list(case.progress))
    assert timeline.held_sm.tolist() == ([0] * len(units) if case.held_sm is None else list(case.held_sm))
    assert timeline.speeds is not None
    for task, speed in case.speeds.items():
        assert timeline.speeds.speed[timeline.speeds.task == task][0] == speed
