"""A file as bytes or text: gzip, byte-order marks and other encodings, cut-off archives."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from overlapsim.errors import CalibrationError

GZIP: Final = b"\x1f\x8b"
CHUNK_BYTES: Final = 1 << 22
# PowerShell redirects to UTF-16.
_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file for reading.

    Raises
    ------
    CalibrationError
        If it cannot be read, is a folder, or is empty.
    """
    try:
        handle = path.open("rb")
        start = handle.read(1)
        handle.seek(0)
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read: {error.strerror}; expected a file of measurements") from None
    if not start:
        handle.close()
        raise CalibrationError(f"{path} is empty; expected a file of measurements")
    return handle


def chunks(path: Path) -> Iterator[bytes]:
    """Content of a file in pieces, unpacked from gzip whatever its name.

    An archive that is cut off ends early with all that could be unpacked, as a cut-off file does.
    """
    with open_bytes(path) as handle:
        packed = handle.read(2) == GZIP
        handle.seek(0)
        pieces = iter(lambda: handle.read(CHUNK_BYTES), b"")
        try:
            yield from _unpacked(pieces) if packed else pieces
        except OSError as error:
            raise CalibrationError(f"{path} cannot be read: {error.strerror}") from None
        except zlib.error:
            return


def _unpacked(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Members of a gzip stream, one after another."""
    member = zlib.decompressobj(wbits=31)
    for piece in pieces:
        rest = piece
        while rest:
            yield member.decompress(rest)
            rest = member.unused_data
            if rest or member.eof:
                member = zlib.decompressobj(wbits=31)
    yield member.flush()


def head(path: Path, size: int = 1 << 16) -> bytes:
    """First bytes of a file, unpacked."""
    content = b""
    for piece in chunks(path):
        content += piece
        if len(content) >= size:
            break
    return content[:size]


def read_text(path: Path) -> str:
    """Whole content as text: UTF-8, UTF-16 with its mark, else Latin-1 (a log may hold a stray byte).

    Raises
    ------
    CalibrationError
        If the file is binary.
    """
    content = b"".join(chunks(path))
    encoding = next((name for mark, name in _MARKS if content.startswith(mark)), "utf-8")
    if encoding == "utf-8" and b"\0" in content[:4096]:
        raise CalibrationError(f"{path} is binary; expected a log, JSON or CSV")
    try:
        return content.decode(encoding)
    except UnicodeDecodeError:
        return content.decode("latin-1")
