"""Program.save and Program.load: equal programs give equal bytes; what is no program file is refused."""

from __future__ import annotations

import io
import zipfile
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from overlapsim.errors import ProgramError
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import Program
from overlapsim.testing.programs import random_program
from tests.schedule.test_program import changed, small_program


@pytest.mark.parametrize("seed", range(10))
def test_save_and_load(seed: int, tmp_path: Path) -> None:
    program = random_program(seed)
    program.save(tmp_path / "a.npz")
    loaded = Program.load(tmp_path / "a.npz")
    assert loaded == program
    for spec in fields(Program):
        before, after = getattr(program, spec.name), getattr(loaded, spec.name)
        assert type(before) is type(after)
        assert np.array_equal(before, after)
        assert getattr(before, "dtype", None) == getattr(after, "dtype", None)
    loaded.save(str(tmp_path / "b.npz"))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "b.npz"]


def test_save_keeps_names_and_replaces_a_file(tmp_path: Path) -> None:
    target = tmp_path / "p.npz"
    target.write_text("older")
    small_program().save(target)
    loaded = Program.load(target)
    assert loaded.op == ("a", "", "", "", "")
    assert loaded.stream_name == ("compute", "", "", "")
    assert loaded.resource_name == ("hbm", "")
    ProgramBuilder().freeze().save(target)
    assert Program.load(target).num_tasks == 0


def test_other_readers_can_open_the_file(tmp_path: Path) -> None:
    small_program().save(tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz", allow_pickle=False) as archive:
        assert set(archive.files) == {spec.name for spec in fields(Program)}
        assert archive["units"].tolist() == [8, 3, 3, 1, 2]


def test_load_refuses_a_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    small_program().save(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 211):
        path.write_bytes(whole[:length])
        with pytest.raises(ProgramError, match="is not a program file"):
            Program.load(path)


def test_load_survives_damage(tmp_path: Path) -> None:
    """One flipped bit gives the same program (names, padding) or a ProgramError; never anything else."""
    path = tmp_path / "p.npz"
    small_program().save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(1)
    refused = 0
    for place, bit in rng.integers(0, (len(whole), 8), (300, 2)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        path.write_bytes(bytes(damaged))
        try:
            assert Program.load(path) == small_program()
        except ProgramError:
            refused += 1
    assert refused > 100


def _foreign_files() -> dict[str, bytes]:
    array, archive, archive_of_objects = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(array, np.arange(3))
    np.savez(archive, x=np.arange(3))
    np.savez(archive_of_objects, pool_num_sms=np.array([None, {}], dtype=object))
    plain_zip = io.BytesIO()
    with zipfile.ZipFile(plain_zip, "w") as z:
        z.writestr("pool_num_sms.npy", "no array")
    return {
        "empty": b"",
        "text": b"kind: operator\n",
        "npy": array.getvalue(),
        "npz": archive.getvalue(),
        "pickles": archive_of_objects.getvalue(),
        "zip": plain_zip.getvalue(),
    }


@pytest.mark.parametrize("name", _foreign_files())
def test_load_refuses_a_foreign_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(_foreign_files()[name])
    with pytest.raises(ProgramError, match=f"{name} is not a program file .* written by Program.save"):
        Program.load(path)


def test_load_refuses_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.npz", tmp_path):
        with pytest.raises(ProgramError, match="is not a program file"):
            Program.load(path)


def test_load_validates(tmp_path: Path) -> None:
    changed("units", 0, 0).save(tmp_path / "bad.npz")
    with pytest.raises(ProgramError, match="task 0: units must be at least 1"):
        Program.load(tmp_path / "bad.npz")
    replace(small_program(), kind=small_program().kind.astype(np.float64)).save(tmp_path / "bad.npz")
    with pytest.raises(ProgramError, match="kind must be a 1-d array of int64; given 1-d float64"):
        Program.load(tmp_path / "bad.npz")
