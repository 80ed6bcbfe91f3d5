from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from overlapsim.validate.cli.main import cli
from overlapsim.validate.plans import read_spec

from overlapsim.errors import OverlapSimError, PlanError
from tests.validate.plan_files import write_plan

PLANS = [
    ("serial", "all_reduce", {}),
    ("chunked", "all_gather", {}),
    ("chunked", "reduce_scatter", {}),
    ("wave_group", "all_reduce", {}),
    ("wave_group", "reduce_scatter", {}),
    ("wave_group", "all_to_all", {}),
    ("ring_exchange", "all_gather", {}),
    ("ring_exchange", "reduce_scatter", {}),
    ("pipelined_rs", "reduce_scatter", {}),
    ("async_tp", "all_gather", {}),
    ("async_tp", "reduce_scatter", {}),
    ("bulk", "reduce_scatter", {"independent_bytes": 2.0**20}),
    ("fused_tiles", "all_gather", {"cluster": "h100-sxm8", "dtype": "fp16"}),
]

UNAPPLIED = {
    "ring_exchange": {"transport_not_applied"},
    "pipelined_rs": {"comm_sms_not_applied", "sm_margin_not_applied"},
    "async_tp": {"transport_not_applied"},
    "bulk": {"comm_sms_not_applied"},
    "fused_tiles": {"transport_not_applied"},
}
"""What these plans ask for that no runner does, and each says so."""


@pytest.mark.parametrize("strategy, collective, more", PLANS, ids=lambda value: str(value))
def test_what_operator_writes_fits(tmp_path: Path, strategy: str, collective: str, more: dict[str, object]) -> None:
    path = write_plan(tmp_path / "plan.yaml", strategy, collective, ranks=2, **more)  # type: ignore[arg-type]
    spec = read_spec(path, ranks=2)
    assert (spec.strategy, spec.collective, spec.ranks) == (strategy, collective, 2)
    assert spec.predicted_s is not None and spec.predicted_s > 0
    assert {finding.code for finding in spec.findings} == UNAPPLIED.get(strategy, set())


def edited(path: Path, change: dict[str, object], block: str = "settings") -> Path:
    content = yaml.safe_load(path.read_text())
    target = content["operators"][0][block] if block in ("settings", "parameters") else content[block]
    for key, value in change.items():
        assert key in target, key
        target[key] = value
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    "strategy, collective, change, told",
    [
        ("wave_group", "all_reduce", {"group_tiles": [3, 4]}, "group"),
        ("wave_group", "all_reduce", {"group_tiles": [0, 20]}, "group"),
        ("wave_group", "all_reduce", {"map": {"tile_slot": [0, 0, 1, 2]}}, "tile"),
        ("wave_group", "reduce_scatter", {"row_order": "shuffled"}, "row_order"),
        ("wave_group", "reduce_scatter", {"ranks": 4}, "ranks"),
        ("wave_group", "all_to_all", {"group_tiles_by_rank": [[20], [19, 1]]}, "group"),
        ("wave_group", "all_reduce", {"bm": 48}, "bm|reorder map"),
        ("wave_group", "all_reduce", {"swizzle": 4}, "swizzle"),
        ("chunked", "all_reduce", {"chunk_rows": [100, 100]}, "chunk_rows"),
        ("chunked", "all_reduce", {"chunk_rows": [400, -100]}, "chunk_rows"),
        ("chunked", "all_reduce", {"collective": "all_to_all"}, "collective"),
        ("ring_exchange", "all_gather", {"form": "spiral"}, "form"),
        ("ring_exchange", "all_gather", {"step_rows": [300]}, "step_rows"),
        ("pipelined_rs", "reduce_scatter", {"split_rows": [1]}, "split_rows"),
        ("async_tp", "all_gather", {"way": "by_mail"}, "way"),
        ("fused_tiles", "all_gather", {"comm_rows": 0}, "comm_rows"),
    ],
)
def test_edited_settings_are_one_clear_error(
    tmp_path: Path, strategy: str, collective: str, change: dict[str, object], told: str
) -> None:
    more = next(more for name, kind, more in PLANS if (name, kind) == (strategy, collective) or name == strategy)
    path = edited(write_plan(tmp_path / "plan.yaml", strategy, collective, ranks=2, **more), change)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=told):
        read_spec(path, ranks=2)
    result = CliRunner().invoke(cli, ["plan", str(path), "--check"])
    assert isinstance(result.exception, OverlapSimError)


def test_other_ranks_are_refused(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.yaml", "chunked", "all_reduce", ranks=2)
    with pytest.raises(PlanError, match="for 2 ranks; 4 are here"):
        read_spec(path, ranks=4)


def test_missing_and_foreign_side_files_are_refused(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.yaml", "wave_group", "all_reduce", ranks=2, m=4224, n=4096, k=64, tile=(64, 64))
    (side,) = tmp_path.glob("reorder-*.npz")
    assert read_spec(path).reorder is not None
    content = side.read_bytes()
    side.write_bytes(content[:-1] + b"!")
    with pytest.raises(PlanError, match="SHA-256"):
        read_spec(path)
    side.unlink()
    with pytest.raises(PlanError, match="cannot read reorder map"):
        read_spec(path)


def test_a_strategy_without_a_runner_is_named(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.yaml", "chunked", "all_reduce", ranks=2)
    path.write_text(path.read_text().replace("strategy: chunked", "strategy: weaving"))
    with pytest.raises(PlanError, match="no runner for strategy 'weaving'"):
        read_spec(path)


def test_alternatives_with_a_runner_are_named(tmp_path: Path) -> None:
    more = {"cluster": "h100-sxm8", "dtype": "bf16", "m": 4096, "n": 4096, "k": 2048, "tile": None}
    path = write_plan(tmp_path / "plan.yaml", "fused_tiles", "reduce_scatter", ranks=2, **more)  # type: ignore[arg-type]
    message = r"takes all_gather; .*of the plan's alternatives serial has one: .*`operator --strategy NAME -o FILE`"
    with pytest.raises(PlanError, match=message):
        read_spec(path)


def test_a_plan_of_a_step_is_sent_to_operator() -> None:
    path = Path(__file__).parents[1] / "emit" / "plans" / "dense.yaml"
    with pytest.raises(PlanError, match=r"is of kind step, .*write an operator plan with `operator --m M .* -o FILE`"):
        read_spec(path)


def test_a_plan_whose_profile_is_gone_still_runs(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.yaml", "chunked", "all_reduce", ranks=2)
    path.write_text(path.read_text().replace("cluster: cpu-gloo8", "cluster: nobody-has-this"))
    assert [finding.code for finding in read_spec(path, ranks=2).findings] == ["profile_missing"]


def test_check_needs_no_torch(tmp_path: Path) -> None:
    """A machine without torch can hold plans against themselves, and show every command's help."""
    path = write_plan(tmp_path / "plan.yaml", "wave_group", "reduce_scatter", ranks=2)
    blocked = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.split('.')[0] in ('torch', 'triton'):\n"
        "            raise ImportError(name + ' is blocked')\n"
        "sys.meta_path.insert(0, Block())\n"
        "from overlapsim.validate.cli.main import COMMANDS, main\n"
        "from click.testing import CliRunner\n"
        "from overlapsim.validate.cli.main import cli\n"
        "for name in COMMANDS:\n"
        "    result = CliRunner().invoke(cli, [name, '--help'])\n"
        "    assert result.exit_code == 0, (name, result.output, result.exception)\n"
        "main(sys.argv[1:])\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", blocked, "plan", str(path), "--check", "--json"], capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["strategy"] == "wave_group"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from overlapsim.validate.cli.main import cli\n"
        "result = CliRunner().invoke(cli, ['--help']); assert result.exit_code == 0, result.output\n"
        "heavy = {'numpy', 'pandas', 'scipy', 'matplotlib', 'numba', 'torch', 'triton', 'simpy', 'yaml', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_bad_plan_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("a: [")
    executable = shutil.which(sys.executable) or sys.executable
    answer = subprocess.run(
        [executable, "-m", "overlapsim.validate", "plan", str(path), "--check"], capture_output=True, text=True
    )
    assert (answer.returncode, answer.stderr.count("\n")) == (2, 1), answer.stderr
    assert answer.stderr.startswith("error: ")
