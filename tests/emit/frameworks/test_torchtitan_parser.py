"""torchtitan's own parsers take what is emitted, and make of it what the plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlapsim.emit.torch_schedules import schedule_class
from overlapsim.emit.torchtitan import EMITTER
from overlapsim.workload.stages import spread_layers
from tests.emit.frameworks.runs import parse, parse_all
from tests.emit.subjects import PLANS, changed, subject

pytestmark = pytest.mark.frameworks
PARSER = "torchtitan_parser.py"
ENVIRONMENTS = {"0.2.2": ("main", "torchtitan.toml"), "0.3.0": ("torchtitan-0.3.0", "torchtitan_plan.py")}


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def parsed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Version, and what its parser makes of each plan: one process for all, since importing takes seconds."""
    version = request.param
    environment, file = ENVIRONMENTS[version]
    arguments: list[object] = []
    for name in PLANS:
        here = tmp_path_factory.mktemp(name)
        for other, text in EMITTER.emit(subject(name), version).files.items():
            (here / other).write_text(text, encoding="utf-8")
        arguments += [here / file, subject(name).layout.world_size, subject(name).spec.num_layers]
    found, said = parse_all(environment, PARSER, *arguments)
    assert len(found) == len(PLANS), said
    return version, dict(zip(PLANS, found, strict=True))


@pytest.mark.parametrize("name", PLANS)
def test_plans_are_parsed_as_planned(name: str, parsed: tuple[str, dict[str, Any]]) -> None:
    base = subject(name)
    layout, settings = base.layout, base.settings
    version, found = parsed[0], parsed[1][name]
    assert found["version"] == version
    assert found["dims"] == {
        "dp_replicate": layout.hsdp,
        "dp_shard": layout.dp // layout.hsdp,
        **{key: getattr(layout, key) for key in ("cp", "tp", "pp", "ep")},
    }
    rounds = settings.num_micro_batches if layout.pp > 1 else 1
    assert found["training"] == [settings.micro_batch * rounds, base.step.inputs.global_batch, base.step.inputs.seq_len]
    if layout.pp > 1:
        assert found["layers"] == list(spread_layers(base.spec.num_layers, layout.pp * layout.vpp))
        assert found["schedule"] == schedule_class(settings)
        assert found["micro_batch"] == settings.micro_batch
        assert bool(found["schedule_csv"]) == (name == "pipeline")
    assert found["recompute"] in ("none", None)
    assert found["async_tp"] == found["compile"] == any(op.strategy == "async_tp" for op in base.entry.operators)


@pytest.mark.parametrize("version", ENVIRONMENTS)
def test_uneven_stages_and_recomputation(version: str, tmp_path: Path) -> None:
    layers = (18, 21, 21, 20)
    base = changed("dense", {"vpp": 1}, schedule="1f1b", stage_layers=layers, recompute="full")
    environment, file = ENVIRONMENTS[version]
    (tmp_path / file).write_text(EMITTER.emit(base, version).files[file], encoding="utf-8")
    found, said = parse(environment, PARSER, tmp_path / file, 64, 80)
    assert found is not None, said
    assert found["layers"] == list(layers)
    assert found["recompute"] in ("full", "FullAC")


def test_its_parser_sees_a_wrong_number_of_ranks(tmp_path: Path) -> None:
    """The comparison above can fail: degrees for other ranks are refused."""
    (tmp_path / "torchtitan.toml").write_text(EMITTER.emit(subject("dense"), "0.2.2").files["torchtitan.toml"])
    found, said = parse("main", PARSER, tmp_path / "torchtitan.toml", 60, 80)
    assert found is None
    assert "Invalid parallel dims" in said
