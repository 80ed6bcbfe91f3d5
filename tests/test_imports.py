"""Who may import whom: rooms in one direction, heavy libraries in one place, nothing heavy for `--help`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# From the bottom up; a room may import itself and what stands on an earlier line.
FLOORS = (
    ("errors",),
    ("units", "strict_yaml"),
    ("plan", "jit"),
    ("workload", "hardware"),
    ("cost",),
    ("schedule",),
    ("strategy",),
    ("engine",),
    ("step",),
    ("planner", "calibration"),
    ("report", "emit", "accuracy"),
    ("sweep",),
    ("cli",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FREE = {"testing", "__init__"}  # the test kit looks at everything and is imported by tests only
ONLY_HERE = {
    "numba": {"overlapsim/jit.py"},
    "simpy": {"overlapsim/engine/reference.py"},
    "dask": set(),
    "distributed": {"overlapsim/sweep/cluster.py"},
    "pyarrow": {"overlapsim/sweep/parquet.py"},
    "torch": set(),
    "triton": set(),
    "matplotlib": {
        f"overlapsim/report/{name}.py"
        for name in ("plots", "plan_plot", "compare_plot", "figures", "scatter", "curves")
    },
}
HEAVY = {"numpy", "pandas", "scipy", "matplotlib", "numba", "torch", "simpy", "yaml", "rich", "dask", "pyarrow"}
PUBLIC = {"overlapsim." + room for room in ("cost", "strategy", "schedule", "workload", "plan", "units", "errors")}


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Yield every module named in an import statement, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "overlapsim" and len(parts) > 1 else None


@pytest.mark.parametrize("path", files("overlapsim"), ids=lambda p: str(p.relative_to(ROOT)))
def test_library(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    here = path.relative_to(ROOT / "overlapsim").parts[0].removesuffix(".py")
    assert here in FLOOR or here in FREE, f"{here} has no floor; add it to FLOORS"
    for module in imports(path):
        top = module.split(".")[0]
        assert top not in ONLY_HERE or name in ONLY_HERE[top], f"{name} imports {module}"
        room = room_of(module)
        if room is None or here in FREE:
            continue
        assert room not in ("validate", "strategies", "testing"), f"{name} imports {module}"
        if room == "hwprofiles":
            assert name == "overlapsim/hardware/loading.py", f"{name} imports {module}"
            continue
        assert room == here or FLOOR[room] < FLOOR[here], f"{name} imports {module}, which stands above or beside it"


@pytest.mark.parametrize("path", files("strategies"), ids=lambda p: str(p.relative_to(ROOT)))
def test_strategies_use_the_public_interface(path: Path) -> None:
    for module in imports(path):
        if module.startswith("overlapsim"):
            own = f"overlapsim.strategies.{path.parent.name}"
            assert module.startswith(own) or any(module == p or module.startswith(p + ".") for p in PUBLIC), module


@pytest.mark.parametrize("folder", ["overlapsim", "strategies", "tests", "validate"])
def test_nobody_uses_the_bare_folder_names(folder: str) -> None:
    for path in files(folder):
        for module in imports(path):
            assert module.split(".")[0] not in ("hwprofiles", "strategies", "validate"), f"{path} imports {module}"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from overlapsim.cli.main import cli\n"
        "result = CliRunner().invoke(cli, ['--help']); assert result.exit_code == 0, result.output\n"
        f"print(sorted({HEAVY} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
