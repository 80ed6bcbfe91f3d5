"""Megatron's own argument checks and rank grid take what is emitted, and make of it what the plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlapsim.emit.lint_base import Facts
from overlapsim.emit.lint_megatron import LINTER
from overlapsim.emit.megatron import ARGUMENTS, EMITTER
from overlapsim.workload.rank_map import RankMap
from tests.emit.frameworks.runs import parse_all
from tests.emit.subjects import PLANS, changed, subject
from tests.emit.test_lint_megatron import KNOWN_GOOD, NAMED
from tests.emit.test_megatron import CHANGES

pytestmark = pytest.mark.frameworks
PARSER = "megatron_parser.py"
GROUPS = {"tp": "tp", "pp": "pp", "cp": "cp", "dp": "dp", "ep": "ep"}
NOT_SEEN = frozenset(
    {
        *("pairs in one queue", "small rounds", "tokens", "too few micro-batches", "twice"),
        "experts without split sequences",
    }
)
"""Conflicts that its checks let through: training stops later, or is wrong or slow."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything that is parsed, in one run: importing takes longer than all of it."""
    folder = tmp_path_factory.mktemp("megatron")
    for name in PLANS:
        (folder / f"{name}.args").write_text(EMITTER.emit(subject(name)).files[ARGUMENTS])
    for name, (base, layout, settings) in CHANGES.items():
        (folder / f"{name}.args").write_text(EMITTER.emit(changed(base, layout, **settings)).files[ARGUMENTS])
    for name, (text, _) in NAMED.items():
        (folder / f"bad {name}.args").write_text(text)
    found, said = parse_all("main", PARSER, *sorted(folder.glob("*.args")), *KNOWN_GOOD)
    assert found, said
    return {Path(entry["file"]).stem: entry for entry in found}


@pytest.mark.parametrize("name", [*PLANS, *CHANGES])
def test_plans_are_accepted_as_planned(name: str, results: dict[str, Any]) -> None:
    plan = subject(name) if name in PLANS else changed(CHANGES[name][0], CHANGES[name][1], **CHANGES[name][2])
    entry, layout = results[name], plan.layout
    assert entry["error"] == ""
    assert (entry["world_size"], entry["dp"], entry["vpp"]) == (layout.world_size, layout.dp, layout.vpp)
    assert entry["overlap_p2p"] == (layout.vpp > 1)


@pytest.mark.parametrize("name", PLANS)
def test_groups_of_ranks_are_ours(name: str, results: dict[str, Any]) -> None:
    ranks = RankMap(subject(name).layout, subject(name).settings.rank_order)
    theirs = results[name]["groups"]
    (rank,) = theirs["rank"]
    for kind, group in GROUPS.items():
        assert theirs[kind] == list(ranks.group(group, rank)), kind  # type: ignore[arg-type]


@pytest.mark.parametrize("path", KNOWN_GOOD, ids=lambda path: path.stem)
def test_known_good_files_are_accepted(path: Path, results: dict[str, Any]) -> None:
    assert results[path.stem]["error"] == ""


@pytest.mark.parametrize("name", sorted(NOT_SEEN))
def test_what_its_checks_let_through_is_ours_to_name(name: str, results: dict[str, Any]) -> None:
    assert results[f"bad {name}"]["error"] == ""


@pytest.mark.parametrize("name", sorted(set(NAMED) - NOT_SEEN))
def test_what_we_call_a_conflict_is_refused(name: str, results: dict[str, Any]) -> None:
    assert results[f"bad {name}"]["error"], LINTER.lint(NAMED[name][0], Facts(architecture="hopper")).lints
