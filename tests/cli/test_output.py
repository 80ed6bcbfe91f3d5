"""The note while the engine compiles, and the width of tables."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from overlapsim.cli.output import COMPILE_NOTE, compile_note, table_width


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block compiles at once, all the time that it takes."""

    @contextmanager
    def at_once(begins: Callable[[], None], ends: Callable[[], None]) -> Iterator[None]:
        begins()
        yield

    monkeypatch.setattr("overlapsim.jit.on_compilation", at_once)


def timers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_a_long_compilation_is_told_once_on_stderr(cold: None, capsys: pytest.CaptureFixture[str]) -> None:
    with compile_note(after_s=0.0):
        for timer in timers():
            timer.join()
    assert timers() == []
    assert capsys.readouterr() == ("", COMPILE_NOTE + "\n")


def test_a_quick_block_prints_nothing_and_leaves_no_thread(cold: None, capsys: pytest.CaptureFixture[str]) -> None:
    with compile_note(after_s=3600.0):
        assert len(timers()) == 1
    assert timers() == []
    assert capsys.readouterr() == ("", "")


def test_errors_pass_and_leave_no_thread(cold: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="inside"), compile_note(after_s=3600.0):
        raise ValueError("inside")
    assert timers() == []
    assert capsys.readouterr() == ("", "")


def test_what_follows_a_short_compilation_is_not_one(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Between compilations the clock stands still: no timer runs while the block does something else."""

    @contextmanager
    def three_short_ones(begins: Callable[[], None], ends: Callable[[], None]) -> Iterator[None]:
        for _ in range(3):
            begins()
            assert len(timers()) == 1
            ends()
            assert timers() == []
        yield

    monkeypatch.setattr("overlapsim.jit.on_compilation", three_short_ones)
    with compile_note(after_s=3600.0):
        assert timers() == []
    assert capsys.readouterr() == ("", "")


def test_a_warm_block_starts_no_clock(capsys: pytest.CaptureFixture[str]) -> None:
    with compile_note(after_s=0.0):
        assert timers() == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("columns", "width"), [("200", 200), ("60", 60), ("", 120), ("0", 120), ("-5", 120), ("wide", 120)]
)
def test_piped_tables_honour_columns(monkeypatch: pytest.MonkeyPatch, capsys, columns: str, width: int) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert table_width() == width


def test_piped_tables_have_a_default_width(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert (table_width(), table_width(140)) == (120, 140)
