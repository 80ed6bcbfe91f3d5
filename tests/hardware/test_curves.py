from __future__ import annotations

from pathlib import Path

import pytest

from overlapsim.errors import ProfileError
from overlapsim.hardware.curves import read_curve

GOOD = "size_bytes,time_s\n1024,1e-5\n2048,1.5e-5\n"


def test_values_source_and_digest() -> None:
    table = read_curve("folder/mine.csv", text=GOOD)
    assert table.size_bytes == (1024.0, 2048.0)
    assert table.time_s == (1e-5, 1.5e-5)
    assert (table.source.layer, table.source.reference) == ("measured", "mine.csv")
    assert len(table.digest) == 64


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + GOOD,
        GOOD.replace("\n", "\r\n"),
        "# from my machine\n\n" + GOOD.replace("2048", "# gap\n2048"),
        " size_bytes , time_s \n 1024 , 1e-5 \n2048,1.5e-5",
    ],
    ids=["bom", "crlf", "comments", "spaces"],
)
def test_harmless_differences_read_alike(text: str) -> None:
    assert read_curve("c.csv", text=text).time_s == (1e-5, 1.5e-5)


def test_one_row_is_enough() -> None:
    assert read_curve("c.csv", text="size_bytes,time_s\n8,1\n").size_bytes == (8.0,)


def test_file_and_text_give_the_same(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert read_curve(path).time_s == (1e-5, 1.5e-5)
    assert read_curve(str(path)).size_bytes == read_curve("c.csv", text=GOOD).size_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("size_bytes,time_s\n", "no rows"),
        ("size_bytes\n1024\n", "no column time_s"),
        ("a,b\n1,2\n", "no column size_bytes"),
        ("1024,1e-5\n", "no header"),
        ("size,time_us\n1024,10\n", "expected the header 'size_bytes,time_s'"),
        ("size_bytes,time_us\n1024,10\n", "expected the header 'size_bytes,time_s'"),
        ("size_bytes,time_s,busbw\n1024,1e-5,3\n", "nothing else"),
        ("time_s,size_bytes\n1e-5,1024\n", "nothing else"),
        (GOOD + "4096,2e-5,7\n", "line 4: 3 cells"),
        (GOOD + "4096\n", "line 4: 1 cells"),
        (GOOD + "4096,fast\n", "line 4: time_s is 'fast'"),
        (GOOD + "4KiB,2e-5\n", "line 4: size_bytes is '4KiB'"),
        (GOOD + "4_096,2e-5\n", "line 4: size_bytes is '4_096'"),
        (GOOD + "4096,\n", "line 4: time_s is ''"),
        (GOOD + "4096,nan\n", "line 4: time_s is nan"),
        (GOOD + "inf,1\n", "line 4: size_bytes is inf"),
        (GOOD + "4096,0\n", "line 4: time_s is 0"),
        (GOOD + "4096,-1e-5\n", "line 4: time_s is -1e-5"),
        (GOOD + "-4096,1e-5\n", "line 4: size_bytes is -4096"),
        (GOOD + "512,5e-6\n", "line 4: size 512 comes after 2048"),
        ("# top\n" + GOOD + "2048,2e-5\n", "line 5: size 2048 appears twice"),
    ],
)
def test_bad_text_is_refused_with_its_place(text: str, expected: str) -> None:
    with pytest.raises(ProfileError, match=r"curve c\.csv") as caught:
        read_curve("c.csv", text=text)
    assert expected in str(caught.value)
    assert caught.value.exit_code == 3


def test_missing_binary_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="does not exist"):
        read_curve(tmp_path / "no.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ProfileError, match="not UTF-8"):
        read_curve(tmp_path / "b.csv")
    with pytest.raises(ProfileError, match="cannot be read"):
        read_curve(tmp_path)
