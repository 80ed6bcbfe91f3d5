"""Names of hosts and users, and addresses: recognised in text so that none leaves a reader."""

from __future__ import annotations

import re
from typing import Final

# What no product name, version or topology in words looks like.
_PRIVATE: Final = re.compile(
    r"""
    [\w.+-]+@[\w.-]+                                    # user@host
    | \b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b              # IPv4
    | \b(?:[0-9a-f]{1,4}:){4,7}[0-9a-f]{1,4}\b          # IPv6, MAC
    | \b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b
    | (?:/home/|/Users/|/root\b|[A-Z]:\\Users\\)\S*     # home folders
    | \b[\w-]+(?:\.[\w-]+)*\.(?:com|org|net|edu|gov|local|internal|lan|cloud|io|ai|cluster)\b   # full host names
    | \b(?:host|hostname|node|user|login|gpu|worker|slurmd?)[-_]?[a-z]*[-_]?\d+(?:[-_.]\w+)*\b   # node17, gpu-0003
    """,
    re.VERBOSE | re.IGNORECASE,
)
MASK: Final = "<dropped>"


def is_private(text: str) -> bool:
    """Whether `text` holds something that looks like a host, a user or an address.

    Examples
    --------
    >>> is_private("NVIDIA H100 80GB HBM3"), is_private("2.27.3"), is_private("ran on node17 by ana@lab.org")
    (False, False, True)
    """
    return _PRIVATE.search(text) is not None


def scrub(text: str) -> str:
    """`text` with everything `is_private` would find replaced.

    Examples
    --------
    >>> scrub("10.0.0.7 with 2.27.3")
    '<dropped> with 2.27.3'
    """
    return _PRIVATE.sub(MASK, text)


def shown(line: str, limit: int = 80) -> str:
    """A line of a log for a message: numbers and lower-case short words stay, all else becomes ``?``.

    Examples
    --------
    >>> shown("1024 256 float sum -1 SECRET-HOST-3 12.9")
    '1024 256 float sum -1 ? 12.9'
    """
    cells = [cell if _HARMLESS.fullmatch(cell) else "?" for cell in line.split()]
    text = " ".join(cells)
    return text if len(text) <= limit else text[: limit - 3] + "..."


_HARMLESS: Final = re.compile(
    r"[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?|N/A|nan|inf|float|half|bfloat16|double|u?int(?:8|32|64)|fp8_e[45]m[23]"
    r"|sum|prod|max|min|avg|none",
    re.IGNORECASE,
)
