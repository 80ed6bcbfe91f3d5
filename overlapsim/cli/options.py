"""Option types shared by commands: quantities with units, tiles, measured kernel times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from overlapsim.errors import UsageError
from overlapsim.report.files import check_writable
from overlapsim.units import parse_bytes, parse_time_s, whole_number


def tile(text: str) -> tuple[int, ...]:
    """Parse ``256x128`` or ``256x128x32`` (BM x BN x BK).

    Raises
    ------
    UsageError
        If the text is not a tile.
    """
    parts = text.lower().split("x")
    if len(parts) not in (2, 3) or not all(1 <= (whole_number(part) or 0) <= 4096 for part in parts):
        raise UsageError(f"tile is {text!r}; expected BMxBN or BMxBNxBK with sizes of 1 to 4096")
    return tuple(int(part) for part in parts)


def dimensions(text: str) -> tuple[int, ...]:
    """Parse ``256:65536`` (2^i and 1.5 x 2^i between, ends included) or ``512,1024,3000``.

    Raises
    ------
    UsageError
        If the text is neither, or a size is below 1.

    Examples
    --------
    >>> dimensions("256:1024")
    (256, 384, 512, 768, 1024)
    >>> dimensions("300:1000")
    (300, 384, 512, 768, 1000)
    """
    expected = "expected FROM:TO such as 256:65536, or a list such as 512,1024"
    parts = text.split(":" if ":" in text else ",")
    if not all(whole_number(part) for part in parts) or (":" in text and len(parts) != 2):
        raise UsageError(f"sizes are {text!r}; {expected}, each at least 1")
    sizes = [int(part) for part in parts]
    if ":" not in text:
        return tuple(sizes)
    low, high = sizes
    if low > high:
        raise UsageError(f"sizes are {text!r}, falling; {expected}")
    round_sizes = (size for power in range(high.bit_length()) for size in (2**power, 3 * 2**power // 2))
    return tuple(sorted({low, high, *(size for size in round_sizes if low <= size <= high)}))


def rank_rows(text: str) -> tuple[int, ...]:
    """Parse rows of each rank such as ``11264,8192,8192,4096``.

    Raises
    ------
    UsageError
        If an entry is not a whole number of at least 1.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(whole_number(part) for part in parts):
        raise UsageError(f"rank rows are {text!r}; expected whole numbers of at least 1 such as 11264,8192")
    return tuple(int(part) for part in parts)


def positive_time_s(text: str) -> float:
    """Seconds of `text`, refusing zero, negative and non-finite times.

    Raises
    ------
    UsageError
        If the text is not a positive time.
    """
    seconds = parse_time_s(text)
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"{text!r} is {seconds:g} s; expected a time above 0")
    return seconds


def size_bytes(text: str) -> float:
    """Bytes of `text` such as ``64MiB``, refusing zero, negative and non-finite sizes.

    Raises
    ------
    UsageError
        If the text is not a positive size.
    """
    size = parse_bytes(text)
    if not (math.isfinite(size) and size > 0):
        raise UsageError(f"{text!r} is {size:g} bytes; expected a size above 0")
    return size


LEAST_GPU_BYTES: Final = 2**30
"""No GPU that is planned for has less: a bare number below it was meant in another unit."""


def gpu_memory_bytes(text: str) -> float:
    """Memory of a GPU such as ``70GiB``: a bare number of bytes is taken where a GPU may have as much.

    Raises
    ------
    UsageError
        If the text is not a positive size, or a number without a unit below 1 GiB.

    Examples
    --------
    >>> gpu_memory_bytes("70GiB")
    75161927680.0
    """
    size = size_bytes(text)
    if size < LEAST_GPU_BYTES and not any(letter in "kKMGTPEiB" for letter in text):
        raise UsageError(f"{text!r} is {size:g} bytes, and no GPU has as little; give a unit such as 70GiB")
    return size


def kernel_times(entries: Sequence[str], own_kernel: Sequence[str], known: Sequence[str]) -> Mapping[str, float]:
    """Parse ``STRATEGY=TIME`` entries.

    Parameters
    ----------
    entries : what was given
    own_kernel : strategies with a kernel of their own, hence with a time to give
    known : all strategies

    Raises
    ------
    UsageError
        If an entry has another form, names an unknown strategy or one that runs the vendor's kernels, or comes twice.
    """
    times: dict[str, float] = {}
    for entry in entries:
        name, found, time = entry.partition("=")
        if not found:
            raise UsageError(f"--kernel-time is {entry!r}; expected STRATEGY=TIME such as wave_group=2.36ms")
        if name not in own_kernel:
            expected = f"expected {' or '.join(own_kernel)}" if own_kernel else "no strategy has a kernel of its own"
            if name in known:
                raise UsageError(f"--kernel-time names {name}; {name} runs the vendor's kernels: give --gemm-time")
            raise UsageError(f"--kernel-time names strategy {name!r}, which is unknown; {expected}")
        if name in times:
            raise UsageError(f"--kernel-time {name} is given twice; give one time")
        times[name] = positive_time_s(time)
    return times


SUFFIXES: Final = {"plan": (".yaml", ".yml"), "trace": (".json", ".json.gz"), "plot": (".png", ".svg")}


def check_targets(**targets: Path | None) -> None:
    """Check all output files before any work, so that no answer is lost and none is half-written.

    Parameters
    ----------
    **targets
        Path or None by kind: ``plan``, ``trace`` or ``plot``.

    Raises
    ------
    UsageError
        If a suffix does not fit its kind, a folder is missing or not writable, or two outputs share a file.
    """
    seen: dict[Path, str] = {}
    for kind, path in targets.items():
        if path is None:
            continue
        if not path.name.endswith(SUFFIXES[kind]):
            raise UsageError(
                f"{kind} file is {str(path)!r}; expected a name that ends in {' or '.join(SUFFIXES[kind])}"
            )
        target = check_writable(path)
        if target in seen:
            raise UsageError(f"{kind} and {seen[target]} both go to {path}; give two files")
        seen[target] = kind
