"""Maps in a plan's settings and in side files: what is read back is what was planned, or a clear error."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.tiles import TileGrid
from overlapsim.errors import PlanError
from overlapsim.plan import Choice, OperatorInputs, OperatorPlan, OperatorSettings, dump_plan, load_plan
from overlapsim.schedule.reorder import (
    MAX_ENTRIES_IN_PLAN,
    SubtokenMap,
    collective_map,
    from_settings,
    map_settings,
    planned_map,
    side_file,
    subtile_map,
    subtoken_map,
    tile_map,
    write_side_file,
)
from tests.cost.published import stored_plans
from tests.schedule.collectives import draw_work, split

KINDS = ("all_reduce", "reduce_scatter", "all_to_all")
SMALL, LARGE = TileGrid(100, 90, 16, 16), TileGrid(1000, 900, 8, 8)


def same(one, other) -> bool:
    """Every attribute of two maps agrees, to the last entry."""
    pairs = [(one, other)]
    if isinstance(one, SubtokenMap):
        pairs += zip(one.sources, other.sources, strict=True)
    for left, right in pairs:
        for name, value in vars(left).items():
            if name != "sources" and not np.array_equal(value, getattr(right, name)):
                return False
    return type(one) is type(other)


def through_a_plan(content: dict) -> dict:
    """Write settings into a plan file and read them back."""
    inputs = OperatorInputs("a800-sxm8", "", 1, 2, 64, 64, 64, "fp16", "fp16", "all_reduce")
    operators = (OperatorSettings("gemm", "fwd", "some", {}, content),)
    plan = OperatorPlan("operator", inputs, Choice("some", "overlap", "none", 1.0, 1.0, 1.0), operators, {}, (), ())
    text = dump_plan(plan)
    assert dump_plan(load_plan(text)) == text
    return dict(load_plan(text).operators[0].settings)


def planned(kind: str, grid: TileGrid, swizzle: int = 2):
    groups = split(np.random.default_rng(3), grid.num_tiles, 5)
    counts = None
    if kind == "all_to_all":
        counts = np.random.default_rng(4).integers(0, grid.m // 2, (4, 4))
    reorder = collective_map(kind, grid, groups, ranks=4, swizzle=swizzle, counts=counts)
    return reorder, {"swizzle": swizzle, **map_settings(reorder)}


@pytest.mark.parametrize("grid", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_through_the_plan_file(kind, grid, tmp_path):
    reorder, content = planned(kind, grid)
    content = through_a_plan(content)
    written = write_side_file(reorder, tmp_path)
    if grid is SMALL:
        assert written is None and not list(tmp_path.iterdir())
        assert len(content["map"]["tile_slot"]) >= grid.num_tiles
    else:
        assert [path.name for path in tmp_path.iterdir()] == [content["map"]["file"]] == [written.name]
        assert hashlib.sha256(written.read_bytes()).hexdigest() == content["map"]["sha256"]
        assert set(content["map"]) == {"file", "sha256"}
    assert same(from_settings(content, tmp_path), reorder)
    assert same(planned_map(content), reorder)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(2, 8))
def test_any_map_is_read_back(seed, ranks):
    rng = np.random.default_rng(seed)
    work = draw_work(rng, multiple=bool(rng.random() < 0.5))
    grid = work.grid
    rows = rng.integers(0, grid.m + 1, ranks)
    maps = [
        tile_map(grid, work.order, work.groups),
        subtile_map(grid, work.order, work.groups, ranks, str(rng.choice(["slab", "interleaved"]))),
        subtoken_map(
            grid.n,
            grid.bm,
            grid.bn,
            [(0, -(-int(count) // grid.bm) * grid.grid_n) for count in rows],
            destinations=[rng.integers(0, ranks, count) for count in rows],
        ),
    ]
    for reorder in maps:
        assert same(from_settings(map_settings(reorder), "nowhere"), reorder)


def test_size_limit_is_on_all_entries_together():
    assert MAX_ENTRIES_IN_PLAN == 4096
    assert side_file(tile_map(TileGrid(64, 64, 1, 1), np.arange(4096), (4096,))) is None
    assert side_file(tile_map(TileGrid(4097, 1, 1, 1), np.arange(4097), (4097,))) is not None
    # 2048 tiles and 2049 destinations: the routing by row counts too, and does not where rows are sorted.
    rows = np.arange(2049) % 2
    groups = [(1025,), (1024,)]
    unsorted = subtoken_map(1, 2, 1, groups, destinations=[rows, rows[:2048]])
    assert side_file(unsorted) is not None and "routing_counts" not in map_settings(unsorted)
    by_rank = subtoken_map(1, 2, 1, groups, destinations=[np.sort(rows), np.sort(rows[:2048])])
    assert side_file(by_rank) is None
    assert map_settings(by_rank)["routing_counts"] == [[1025, 1024], [1024, 1024]]


def test_unsorted_routing_goes_into_the_side_file(tmp_path):
    rows = np.random.default_rng(0).integers(0, 2, 5000)
    reorder = subtoken_map(8, 4, 4, [(1000, 1500), (0, 0)], destinations=[rows, []])
    content = {"swizzle": 1, **map_settings(reorder)}
    write_side_file(reorder, tmp_path)
    assert same(from_settings(content, tmp_path), reorder)
    with pytest.raises(PlanError, match="row by row"):
        planned_map(content)


@pytest.mark.parametrize("plan", stored_plans(), ids=lambda plan: f"m{plan.m}")
def test_recorded_order_is_kept_and_not_taken_for_a_rule(plan, tmp_path):
    reorder = tile_map(TileGrid(plan.m, plan.n, plan.bm, plan.bn), plan.order, plan.group_tiles)
    content = {"swizzle": 4, **map_settings(reorder)}
    assert ("file" in content["map"]) == (plan.m == 32768)
    write_side_file(reorder, tmp_path)
    assert from_settings(content, tmp_path).slot_tile.tolist() == list(plan.order)
    with pytest.raises(PlanError, match="recorded"):
        planned_map(content)


def test_side_file_is_the_same_on_every_machine_and_plain_numpy_reads_it(tmp_path):
    reorder, content = planned("all_reduce", LARGE)
    # A changed digest breaks plans already written: these bytes are part of the format.
    side = side_file(reorder)
    assert side.sha256 == "aef986a7450a1e7b1d1c0ee75b2fc954c346ab2f9ce4a95c8e6d7d06dd0bc557"
    assert side.name == "reorder-aef986a7450a1e7b.npz"
    path = write_side_file(reorder, tmp_path)
    assert path.read_bytes() == side.data
    with np.load(path, allow_pickle=False) as arrays:
        assert arrays.files == ["tile_slot"] and arrays["tile_slot"].dtype == np.dtype("<i4")
        assert (arrays["tile_slot"] == reorder.tile_slot).all()
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo("tile_slot.npy")
        assert (entry.date_time, entry.compress_type) == ((1980, 1, 1, 0, 0, 0), zipfile.ZIP_STORED)
    assert content["map"] == {"file": side.name, "sha256": side.sha256}


def test_writing_is_whole_or_nothing(tmp_path, monkeypatch):
    reorder, content = planned("all_reduce", LARGE)
    write_side_file(reorder, tmp_path)
    first = (tmp_path / content["map"]["file"]).read_bytes()

    def full(self, data):
        with self.open("wb") as handle:
            handle.write(data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(PlanError, match="No space left"):
        write_side_file(reorder, tmp_path)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [first]
    monkeypatch.undo()
    with pytest.raises(PlanError, match="another folder"):
        write_side_file(reorder, tmp_path / "missing")


def test_side_file_must_be_the_one_of_the_plan(tmp_path):
    reorder, content = planned("all_reduce", LARGE)
    with pytest.raises(PlanError, match="keep it beside its plan"):
        from_settings(content, tmp_path)
    path = write_side_file(reorder, tmp_path)
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(PlanError, match="belongs to another plan"):
        from_settings(content, tmp_path)
    for data, words in (
        (b"no zip", "not a reorder map"),
        (archive_of(np.array([1, 2])), "list of int32"),
        (archive_of(np.array([[1, 2]], np.int32)), "list of int32"),
        (archive_of(np.array([None])), "not a reorder map"),
    ):
        path.write_bytes(data)
        with pytest.raises(PlanError, match=words):
            from_settings({**content, "map": {"file": path.name, "sha256": hashlib.sha256(data).hexdigest()}}, tmp_path)
    outside = {**content, "map": {"file": f"../{path.name}", "sha256": "0"}}
    with pytest.raises(PlanError, match="beside the plan"):
        from_settings(outside, tmp_path / "sub")


def archive_of(array) -> bytes:
    data = io.BytesIO()
    np.savez(data, tile_slot=array)
    return data.getvalue()


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("all_reduce", {"map": None}, "map in the plan's settings is None"),
        ("all_reduce", {"map": {}}, "expected tile_slot"),
        ("all_reduce", {"map": {"tile_slot": [0, 1]}}, "permutation"),
        ("all_reduce", {"map": {"tile_slot": list(range(1, 43))}}, "permutation"),
        ("all_reduce", {"map": {"tile_slot": [0.5] * 42}}, "whole numbers"),
        ("all_reduce", {"map": {"tile_slot": [True] * 42}}, "whole numbers"),
        ("all_reduce", {"map": {"tile_slot": [2**31] * 42}}, "whole numbers"),
        ("all_reduce", {"map": {"file": "x"}}, "sha256"),
        ("all_reduce", {"m": 300}, "permutation of 0 .. 113"),
        ("all_reduce", {"m": "100"}, "expected int"),
        ("all_reduce", {"bm": True}, "expected int"),
        ("all_reduce", {"bn": 0}, "bn = 0"),
        ("all_reduce", {"group_tiles": [41]}, "adding up to 42"),
        ("all_reduce", {"group_tiles": "42"}, "whole numbers"),
        ("all_reduce", {"map_kind": "quilt"}, "subtile"),
        ("reduce_scatter", {"row_order": "auto"}, "interleaved"),
        ("reduce_scatter", {"ranks": 0}, "0 ranks"),
        ("all_to_all", {"rows_by_rank": [1, 2]}, "tile_slot of the plan's map has"),
        ("all_to_all", {"routing_counts": [[1] * 4] * 4}, "rows_by_rank"),
        ("all_to_all", {"routing_counts": [[1] * 3] * 4}, "rows_by_rank"),
        ("all_to_all", {"group_tiles_by_rank": [[1], [2], [3], [4]]}, "adding up"),
        ("all_to_all", {"group_tiles_by_rank": 7}, "expected list"),
    ],
)
def test_broken_settings_are_refused(kind, change, words, tmp_path):
    _, content = planned(kind, SMALL)
    with pytest.raises(PlanError, match=words):
        from_settings({**content, **change}, tmp_path)


def test_missing_swizzle_is_refused():
    _, content = planned("all_reduce", SMALL)
    with pytest.raises(PlanError, match="swizzle"):
        planned_map({**content, "swizzle": None})
