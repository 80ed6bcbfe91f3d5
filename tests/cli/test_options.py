"""Ranges of sizes and measured kernel times as they are typed."""

from __future__ import annotations

import pytest

from overlapsim.cli.options import dimensions, gpu_memory_bytes, kernel_times
from overlapsim.errors import UsageError

KNOWN = ("chunked", "serial", "wave_group")


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("256:2048", (256, 384, 512, 768, 1024, 1536, 2048)),
        ("1:8", (1, 2, 3, 4, 6, 8)),
        ("300:1000", (300, 384, 512, 768, 1000)),
        ("384:384", (384,)),
        ("5:5", (5,)),
        ("512,1024,3000", (512, 1024, 3000)),
    ],
)
def test_dimensions(text: str, sizes: tuple[int, ...]) -> None:
    assert dimensions(text) == sizes


def test_the_default_range_holds_round_sizes_only() -> None:
    sizes = dimensions("256:65536")
    assert len(sizes) == 17
    assert all(size % 128 == 0 for size in sizes)


@pytest.mark.parametrize("text", ["", "0:8", "8:4", "1:2:3", "a", "4,-1", "2.5"])
def test_dimensions_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="sizes are"):
        dimensions(text)


def test_kernel_times() -> None:
    assert kernel_times(["wave_group=2.5ms"], ("wave_group",), KNOWN) == {"wave_group": 2.5e-3}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["chunked=2ms"], "chunked runs the vendor's kernels: give --gemm-time"),
        (["serial=2ms"], "serial runs the vendor's kernels: give --gemm-time"),
        (["wave_groop=2ms"], "'wave_groop', which is unknown; expected wave_group"),
        (["wave_group"], "STRATEGY=TIME"),
        (["wave_group=1ms", "wave_group=2ms"], "twice"),
        (["wave_group=0"], "above 0"),
    ],
)
def test_kernel_times_refuses(entries: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kernel_times(entries, ("wave_group",), KNOWN)


@pytest.mark.parametrize("text", ["70", "1e6", "1073741823"])
def test_memory_without_a_unit_that_no_gpu_has_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="give a unit such as 70GiB"):
        gpu_memory_bytes(text)


@pytest.mark.parametrize(
    ("text", "size"), [("70GiB", 70 * 2**30), ("80 GB", 8e10), ("512MiB", 2**29), ("75161927680", 75161927680)]
)
def test_memory_with_a_unit_or_enough_bytes_is_taken(text: str, size: float) -> None:
    assert gpu_memory_bytes(text) == size
