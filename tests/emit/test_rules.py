"""Versions and the rules on flags: since when, until when, and never a silently wrong one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapsim.emit.rules import FRAMEWORKS, Flag, Sheet, Version, settle, spelt, words
from overlapsim.errors import UsageError

NUMBERS = st.lists(st.integers(0, 40), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0.19.2", (0, 19, 2)),
        ("core_v0.19.0", (0, 19)),
        ("v2.18", (2, 18)),
        ("2.13.0a0", (2, 13)),
        ("0.20.0.dev0", (0, 20)),
        ("2.30.7-rc1", (2, 30, 7)),
    ],
)
def test_versions_are_read_by_their_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert Version.parse(text).numbers == numbers


@pytest.mark.parametrize("text", ["", "main", "1..2", "-1", "0.1.2.3.4"])
def test_what_is_no_version_is_one_clear_error(text: str) -> None:
    with pytest.raises(UsageError, match="expected numbers such as"):
        Version.parse(text)


@given(NUMBERS, NUMBERS)
def test_versions_are_ordered_as_their_numbers(one: list[int], other: list[int]) -> None:
    padded = [tuple(part + [0] * (4 - len(part))) for part in (one, other)]
    a, b = (Version.parse(".".join(map(str, part))) for part in (one, other))
    assert (a < b, a == b, a > b) == (padded[0] < padded[1], padded[0] == padded[1], padded[0] > padded[1])


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_versions_outside_what_is_known_are_findings(name: str) -> None:
    known = FRAMEWORKS[name]
    oldest, newest = Version.parse(known.oldest), Version.parse(known.newest)
    assert settle(name, None) == (newest, ())
    assert settle(name, known.oldest) == (oldest, ())
    older, findings = settle(name, "0.0.1")
    assert older == oldest
    assert [f.code for f in findings] == ["framework_version_stale"]
    newer, findings = settle(name, "99.1")
    assert newer == newest
    assert [f.code for f in findings] == ["framework_version_unknown"]
    assert "99.1" in findings[0].message
    assert known.newest in findings[0].message


def test_an_unknown_framework_names_the_known() -> None:
    with pytest.raises(UsageError, match="expected one of megatron"):
        settle("nemo", None)


FLAGS = {
    "old": Flag("--old", "switch", until="0.19"),
    "new": Flag("--new", since="0.16", before="--older"),
    "newest": Flag("--newest", "switch", since="0.19"),
    "kind": Flag("--kind", choices=("a", "b@0.19")),
}


def test_a_sheet_holds_what_the_version_has_and_says_the_rest() -> None:
    sheet = Sheet("It", FLAGS, Version.parse("0.15"))
    assert sheet.set("old")
    assert sheet.set("new", 3)
    assert not sheet.set("newest", why="nothing overlaps")
    assert sheet.lines == [("--old", ()), ("--older", (3,))]
    assert sheet.unexpressed == ["It 0.15 has no --newest (it came with 0.19): nothing overlaps"]
    assert not sheet.set("kind", "b")
    assert sheet.unexpressed[-1] == "It 0.15 has no b for --kind"
    later = Sheet("It", FLAGS, Version.parse("0.19"))
    assert later.set("kind", "b")
    assert not later.set("old")
    assert later.unexpressed == ["It 0.19 has no --old (gone)"]
    assert spelt(FLAGS, Version.parse("0.19")) == {"--new": "new", "--newest": "newest", "--kind": "kind"}


def test_a_value_out_of_the_table_is_a_defect_of_ours() -> None:
    sheet = Sheet("It", FLAGS, Version.parse("0.19"))
    with pytest.raises(AssertionError):
        sheet.set("kind", "c")
    with pytest.raises(AssertionError):
        sheet.set("newest", 1)


def test_values_are_written_as_parsers_read_them() -> None:
    assert words([1.28e8, 0.5, False, "p2p"]) == "128000000 0.5 0 p2p"
