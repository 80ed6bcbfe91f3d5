"""A strategy of another package, found by its entry point; one more folder, found without touching anything else."""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

import overlapsim.strategies
import pytest

from overlapsim.cost.prices import PriceBook
from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.operator import plan_operator
from overlapsim.strategy.base import Context
from overlapsim.strategy.registry import load_strategies, load_strategy, strategy_names
from overlapsim.testing.strategies import conformance
from overlapsim.workload.operators import GemmOp, gemm_and_collective

PACKAGE = Path(__file__).parent / "example_package"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package as an installer would leave it: its modules, and a dist-info with its entry points."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    shutil.copytree(PACKAGE / "overlapsim_halves", tmp_path / "overlapsim_halves")
    info = tmp_path / f"overlapsim_halves-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("overlapsim_halves", None)


def test_is_listed_planned_and_passes_the_suite(installed) -> None:
    assert "halves" in strategy_names()
    strategy = load_strategy("halves")
    for check, case in conformance(strategy):
        check(strategy, case)
    gemm = GemmOp(8192, 8192, 4096)
    prices = PriceBook(load_cluster("a800-sxm8"), 8, gemm=gemm, kind="all_reduce")
    context = Context(gemm_and_collective(gemm, "all_reduce", 8), prices)
    result = plan_operator(context, load_strategies(("serial", "halves")))
    assert result.best.strategy.name == "halves" and result.best.speedup > 1


def test_is_gone_when_the_package_is() -> None:
    assert "halves" not in strategy_names()


def test_a_new_folder_is_enough(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "thirds"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""A new folder."""\n')
    source = (PACKAGE / "overlapsim_halves" / "__init__.py").read_text()
    (folder / "strategy.py").write_text(source.replace('name = "halves"', 'name = "thirds"'))
    monkeypatch.setattr(
        overlapsim.strategies, "__path__", [*overlapsim.strategies.__path__, str(tmp_path)], raising=True
    )
    assert "thirds" in strategy_names()
    assert load_strategy("thirds").name == "thirds"
    for name in [name for name in sys.modules if name.startswith("overlapsim.strategies.thirds")]:
        del sys.modules[name]
