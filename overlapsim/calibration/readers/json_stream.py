"""JSON files of any size, element by element: the items of one long list, and the short values beside it."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from overlapsim.calibration.readers.source import chunks
from overlapsim.errors import CalibrationError

_BLANK: Final = " \t\r\n"
# A value beside the list that is longer than this means that the list was missed.
MAX_VALUE_CHARS: Final = 64 << 20


@dataclass
class Beside:
    """What stands beside the list.

    Attributes
    ----------
    values : top-level keys other than the list, as far as they were read
    cut_off : the file ended before its JSON did
    bytes_read : of the unpacked file
    """

    values: dict[str, Any] = field(default_factory=dict)
    cut_off: bool = False
    bytes_read: int = 0


class _EndOfFileError(Exception):
    """The text ended within a value."""


def items(path: Path, key: str, beside: Beside, *, progress: Callable[[int], None] | None = None) -> Iterator[Any]:
    """Items of the list under the top-level `key`, or of a top-level list, one at a time.

    A file that is cut off gives the items before the cut, and `beside` says so.

    Parameters
    ----------
    path : file, packed with gzip or not
    key : name of the list
    beside : filled while the items are taken
    progress : called with the bytes read so far

    Raises
    ------
    CalibrationError
        If the text is not JSON.
    """
    reader = _Reader(path, beside, progress)
    try:
        start = reader.peek()
        if start == "[":
            yield from reader.list_items()
        elif start == "{":
            yield from _object_items(reader, key, beside)
        else:
            raise CalibrationError(f"{path} is not JSON: it begins with {start!r}")
    except _EndOfFileError:
        beside.cut_off = True


def _object_items(reader: _Reader, key: str, beside: Beside) -> Iterator[Any]:
    reader.take("{")
    while reader.peek() != "}":
        name = reader.value()
        reader.take(":")
        if name == key and reader.peek() == "[":
            yield from reader.list_items()
        else:
            beside.values[str(name)] = reader.value()
        if reader.peek() == ",":
            reader.take(",")


class _Reader:
    """A window over the text that grows until the value in it is whole."""

    def __init__(self, path: Path, beside: Beside, progress: Callable[[int], None] | None) -> None:
        self._path = path
        self._pieces = chunks(path)
        self._decode = codecs.getincrementaldecoder("utf-8-sig")(errors="replace").decode
        self._parse = json.JSONDecoder(strict=False).raw_decode
        self._beside, self._progress = beside, progress
        self._text, self._at = "", 0

    def peek(self) -> str:
        """Next character that is not blank."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _BLANK:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            self._more()

    def take(self, expected: str) -> None:
        """Pass over one character."""
        if self.peek() != expected:
            raise CalibrationError(
                f"{self._path} is not JSON: expected {expected!r} near byte {self._beside.bytes_read}"
            )
        self._at += 1

    def value(self) -> Any:
        """The next value."""
        start = self.peek()
        while True:
            try:
                value, end = self._parse(self._text, self._at)
            except json.JSONDecodeError as error:
                # Only a value that reaches the end of the window may be whole with more text.
                if len(self._text) - self._at > MAX_VALUE_CHARS:
                    raise CalibrationError(f"{self._path} is not JSON: {error.msg}") from None
                self._more()
                continue
            # A number at the end of the window may go on in the next piece.
            if end == len(self._text) and start not in '{["':
                try:
                    self._more()
                except _EndOfFileError:
                    pass
                else:
                    continue
            self._at = end
            return value

    def list_items(self) -> Iterator[Any]:
        """Items of the list that begins here."""
        self.take("[")
        while self.peek() != "]":
            yield self.value()
            if self.peek() == ",":
                self.take(",")
        self.take("]")

    def _more(self) -> None:
        piece = next(self._pieces, None)
        if piece is None:
            raise _EndOfFileError
        self._beside.bytes_read += len(piece)
        if self._progress is not None:
            self._progress(self._beside.bytes_read)
        self._text = self._text[self._at :] + self._decode(piece)
        self._at = 0
