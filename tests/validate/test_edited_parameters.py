"""Parameters of a plan that were edited: refused by the check, although runners go by settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from overlapsim.validate.plans import spec_of

from overlapsim.errors import StrategyError
from overlapsim.plan import read_plan
from tests.validate.plan_files import write_plan

STRATEGIES = {
    "wave_group": ("all_reduce", "sms"),
    "chunked": ("all_reduce", "chunks"),
    "async_tp": ("reduce_scatter", "co_run"),
    "ring_exchange": ("reduce_scatter", "compute_streams"),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("value", [None, "nonsense", [], 1.5])
def test_parameters_of_another_type(tmp_path: Path, strategy: str, value: Any) -> None:
    collective, name = STRATEGIES[strategy]
    path = write_plan(tmp_path / "plan.yaml", strategy, collective, ranks=2, m=1024, n=1024, k=256)
    spec_of(read_plan(path), tmp_path)
    content = yaml.safe_load(path.read_text())
    content["operators"][0]["parameters"][name] = value
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(StrategyError, match=f"parameters of {strategy} cannot be used"):
        spec_of(read_plan(path), tmp_path)
