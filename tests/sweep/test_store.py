"""What survives a kill at any byte, what is refused, and the same rows in both formats."""

from __future__ import annotations

import builtins
import tempfile
from pathlib import Path

import pyarrow.dataset
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.errors import UsageError
from overlapsim.sweep.keys import Column
from overlapsim.sweep.parquet import ParquetStore
from overlapsim.sweep.spec import parse_sweep
from overlapsim.sweep.store import CsvStore, find_store
from tests.sweep.parts import Inline, canned, operators, run

COLUMNS = (
    *(Column("id", "text"), Column("status", "text"), Column("note", "text")),
    *(Column("count", "int"), Column("time_s", "float"), Column("flag", "bool")),
)
ROWS = [
    ("a", "ok", 'say "x", y', 3, 0.1, True),
    ("b", "failed", "", None, None, False),
    ("c", "ok", "é", -1, 1e-9, None),
]


def whole(path: Path) -> bytes:
    run(operators("[64, 128, 192, 256]"), path, Inline(canned))
    return path.read_bytes()


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_cut_anywhere_and_carried_on_is_the_whole_file(data: st.DataObject) -> None:
    """A kill leaves the file cut at some byte; rows in another order are those of another speed of the workers."""
    sweep = parse_sweep(operators("[64, 128, 192, 256]"))
    with tempfile.TemporaryDirectory() as folder:
        content = whole(Path(folder) / "whole.csv")
        header, *lines = content.splitlines(keepends=True)
        arrived = data.draw(st.permutations(lines))
        cut = data.draw(st.integers(0, sum(map(len, lines))))
        path = Path(folder) / "cut.csv"
        path.write_bytes(header + b"".join(arrived)[:cut])
        kept = (header + b"".join(arrived)[:cut]).count(b"\n") - 1
        workers = Inline(canned)
        done = run(sweep, path, workers)
        asked = [id_ for task in workers.tasks for id_, _ in task.points]
        assert (done.num_done_before, done.num_run, len(asked), len(set(asked))) == (kept, 8 - kept, 8 - kept, 8 - kept)
        assert path.read_bytes() == content
        assert [entry.name for entry in Path(folder).iterdir() if "part" in entry.name] == []


def test_a_spec_that_grows_keeps_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    run(operators("[64, 128]"), path, Inline(canned))
    workers = Inline(canned)
    done = run(operators("[32, 64, 128]"), path, workers)
    assert (done.num_done_before, done.num_run) == (4, 2)
    assert {values["m"] for task in workers.tasks for _, values in task.points} == {32}
    fresh = tmp_path / "fresh.csv"
    run(operators("[32, 64, 128]"), fresh, Inline(canned))
    assert path.read_bytes() == fresh.read_bytes()


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_results_of_other_points_are_refused(tmp_path: Path, name: str) -> None:
    run(operators("[64, 128]"), tmp_path / name, Inline(canned))
    with pytest.raises(UsageError, match=r"hold 2 point\(s\) that this sweep does not ask for"):
        run(operators("[64]"), tmp_path / name, Inline(canned))
    other = (
        "{kind: sweep, command: simulate, points: [{model: llama2-7b, cluster: a100-sxm8, seq: 8, global_batch: 8}]}"
    )
    with pytest.raises(UsageError, match="columns of this sweep"):
        run(other, tmp_path / name, Inline(canned))


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.csv"
    path.write_text("do not lose this")
    with pytest.raises(UsageError, match="does not begin with the columns"):
        find_store(path, COLUMNS)
    assert path.read_text() == "do not lose this"
    folder = tmp_path / "data.parquet"
    folder.mkdir()
    (folder / "photo.jpg").write_text("")
    with pytest.raises(UsageError, match=r"holds photo\.jpg"):
        find_store(folder, COLUMNS)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("out.txt", "expected a file .csv, or a folder .parquet"),
        ("missing/out.csv", "does not exist"),
        ("missing/out.parquet", "does not exist"),
    ],
)
def test_places_that_cannot_be(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find_store(tmp_path / name, COLUMNS)


@pytest.mark.parametrize("bad", [b"a,ok\n", b"a,ok,,,,\na,ok,,,,\n"])
def test_damaged_rows_are_refused(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "out.csv"
    path.write_bytes(b"id,status,note,count,time_s,flag\n" + bad)
    with pytest.raises(UsageError, match=r"has 2 cells|twice"):
        find_store(path, COLUMNS)


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_one_writer_at_a_time(tmp_path: Path, name: str) -> None:
    first = find_store(tmp_path / name, COLUMNS)
    first.open()
    second = find_store(tmp_path / name, COLUMNS)
    with pytest.raises(UsageError, match="another sweep writes"):
        second.open()
    second.close()
    first.append(ROWS)
    first.flush()
    first.close()
    second.open()
    assert second.done == {"a": "ok", "b": "failed", "c": "ok"}
    second.close()


def test_csv_cells(tmp_path: Path) -> None:
    store = CsvStore(tmp_path / "out.csv", COLUMNS)
    store.open()
    store.append(ROWS)
    assert (tmp_path / "out.csv").read_text(encoding="utf-8") == (
        'id,status,note,count,time_s,flag\na,ok,"say ""x"", y",3,0.1,true\nb,failed,,,,false\nc,ok,é,-1,1e-09,\n'
    )
    store.finish(["c", "a", "b"])
    store.close()
    assert [line[0] for line in (tmp_path / "out.csv").read_text(encoding="utf-8").splitlines()[1:]] == ["c", "a", "b"]


def test_parquet_parts_are_one_table_with_types(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    for rows in (ROWS[:2], ROWS[2:]):  # two runs, two parts
        store = ParquetStore(path, COLUMNS)
        store.open()
        store.append(rows)
        store.finish([])
        store.close()
    (path / ".part-00002.parquet.123-4.part").write_bytes(b"half a part")
    assert [entry.name for entry in sorted(path.glob("part-*"))] == ["part-00000.parquet", "part-00001.parquet"]
    table = pyarrow.dataset.dataset(path).to_table()
    assert [tuple(row.values()) for row in table.to_pylist()] == ROWS
    assert [str(field.type) for field in table.schema] == ["string", "string", "string", "int64", "double", "bool"]
    again = ParquetStore(path, COLUMNS)
    assert list(again.done) == ["a", "b", "c"]
    again.open()
    again.close()
    assert not list(path.glob(".part*"))  # what a killed run left


def test_a_part_is_written_when_it_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlapsim.sweep.parquet.PART_ROWS", 4)
    path = tmp_path / "out.parquet"
    run(operators("[64, 128, 192, 256, 320]"), path, Inline(canned))
    rows = [pyarrow.parquet.read_metadata(part).num_rows for part in sorted(path.glob("part-*"))]
    assert sum(rows) == 10 and rows[:-1] and min(rows[:-1]) >= 4


def test_both_formats_hold_the_same(tmp_path: Path) -> None:
    """Real answers: numbers read back exactly."""
    import pandas as pd

    text = operators("[1024, 2048]")
    for name in ("out.csv", "out.parquet"):
        run(text, tmp_path / name)
    parquet = pd.read_parquet(tmp_path / "out.parquet").set_index("id")
    table = pd.read_csv(tmp_path / "out.csv").set_index("id")
    assert set(parquet.index) == set(table.index) and len(table) == 4
    parquet = parquet.loc[table.index]
    for column in table.columns:
        for ours, theirs in zip(table[column], parquet[column], strict=True):
            empty = (ours is None or ours != ours, theirs is None or theirs != theirs or theirs == "")
            assert empty == (True, True) or ours == theirs, column


def test_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args, **kwargs):
        if name.split(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"pip install 'overlapsim\[cluster\]'"):
        find_store(tmp_path / "out.parquet", COLUMNS)
