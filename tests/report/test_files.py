"""Whole files or none."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from overlapsim.errors import UsageError
from overlapsim.report.files import check_writable, write_bytes, write_text


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_text_is_utf8_with_unix_line_ends_and_replaces(tmp_path: Path) -> None:
    target = tmp_path / "answer.txt"
    target.write_text("a much longer text than the new one")
    write_text(target, "µs\n")
    assert target.read_bytes() == b"\xc2\xb5s\n"
    assert names(tmp_path) == ["answer.txt"]


def test_permissions_of_new_and_of_replaced_files(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    old_umask = os.umask(0o027)
    try:
        write_bytes(target, b"1")
    finally:
        os.umask(old_umask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    target.chmod(0o604)
    write_bytes(target, b"2")
    assert stat.S_IMODE(target.stat().st_mode) == 0o604
    assert target.read_bytes() == b"2"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real.json"
    real.write_bytes(b"old")
    link = tmp_path / "link.json"
    link.symlink_to(real)
    write_bytes(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


def test_devices_are_written_directly() -> None:
    write_bytes("/dev/null", b"gone")
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize("write", [check_writable, lambda path: write_bytes(path, b"x")])
def test_refusals_name_the_path(tmp_path: Path, write: object) -> None:
    assert callable(write)
    missing = tmp_path / "no" / "such" / "x.json"
    with pytest.raises(UsageError, match=r"no/such/x\.json.*does not exist"):
        write(missing)
    with pytest.raises(UsageError, match="is a folder"):
        write(tmp_path)
    with pytest.raises(UsageError, match="is a folder"):
        write("")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match=r"file/x\.json.*is not a folder"):
        write(tmp_path / "file" / "x.json")
    assert names(tmp_path) == ["file"]


def test_an_unwritable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match=r"x\.json.*not writable"):
        write_bytes(tmp_path / "x.json", b"")
    assert names(tmp_path) == []


@pytest.mark.parametrize("failing", ["write_bytes", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    target = tmp_path / "x.json"
    target.write_bytes(b"old")
    original = Path.write_bytes

    def fail(self: Path, *args: bytes) -> int:
        if failing == "write_bytes":
            original(self, b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, failing, fail)
        with pytest.raises(UsageError, match=r"x\.json: No space left"):
            write_bytes(target, b"new")
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["x.json"]


def test_an_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_bytes(tmp_path / "x.json", b"new")
    assert names(tmp_path) == []
