"""Every strategy passes the suite of ``overlapsim.testing.strategies``."""

from __future__ import annotations

import pytest

from overlapsim.strategy.registry import load_strategy, strategy_names
from overlapsim.testing.strategies import CHECKS, Case, cases

ALL = [(name, case) for name in strategy_names() for case in cases(load_strategy(name))]


@pytest.mark.parametrize(("name", "case"), ALL, ids=[f"{name}-{case.name}" for name, case in ALL])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_conformance(check, name: str, case: Case) -> None:
    check(load_strategy(name), case)
