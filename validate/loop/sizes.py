"""What the loop measures, and what it predicts: the sizes of the one are not among those of the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from overlapsim.validate.plans import RunSpec
from overlapsim.validate.shapes import chunked_spec, serial_spec, wave_group_spec

from overlapsim.units import dtype_bytes

DTYPE: Final = "fp32"
KINDS: Final = ("all_reduce", "reduce_scatter", "all_to_all")
GEMM_SHAPES: Final = tuple(
    (m, n, k) for m in (128, 192, 256, 384, 512, 768, 1024, 1536) for n in (128, 512, 1024) for k in (192, 512)
)
"""48 shapes: a fit needs 45 with a third held out to judge it."""
SIZES: Final = (*sorted(2**i * step // 2 for i in range(16, 24) for step in (2, 3)), 2**24)
"""64 KiB to 16 MiB, two an octave."""
BESIDE_SHAPES: Final = ((512, 1024, 512), (1024, 1024, 512))
"""GEMMs that contention is measured with: 2 and 4 MiB of output."""
KERNEL_SHAPES: Final = ((512, 512, 192), (512, 1024, 512), (1024, 1024, 256))
"""GEMMs that the kernel by tiles is measured with."""
TILE: Final = (128, 128, 64)
HEADLINE: Final = ((640, 640, 384), (896, 1152, 320), (1408, 1664, 448))
"""Held-out shapes: 1.6, 4.1 and 9.4 MB of output, multiples of a tile so that CPU kernels have no odd edges."""
CHUNKS: Final = (2, 4)
GROUPS: Final = (2, 4)


def headline_specs(ranks: int) -> list[tuple[str, RunSpec]]:
    """Cases by name: every shape and collective serially, in chunks and in wave groups."""
    found = []
    for kind in KINDS:
        for m, n, k in HEADLINE:
            name = f"{kind} {m}x{n}x{k}"
            base = serial_spec(kind, ranks, m, n, k, DTYPE)
            found.append((name, base))
            found += [(name, chunked_spec(base, chunks)) for chunks in CHUNKS]
            found += [(name, wave_group_spec(base, TILE, groups)) for groups in GROUPS]
    return found


def kernel_specs(ranks: int) -> list[RunSpec]:
    """Signalled kernels that are timed alone."""
    bases = (serial_spec("all_reduce", ranks, m, n, k, DTYPE) for m, n, k in KERNEL_SHAPES)
    return [replace(wave_group_spec(base, TILE, 2)) for base in bases]


def is_held_out(spec: RunSpec) -> bool:
    """Whether neither the GEMM nor the collective of a case was measured as a part."""
    seen = {*GEMM_SHAPES, *BESIDE_SHAPES, *KERNEL_SHAPES}
    sizes = {*SIZES, *(m * n * dtype_bytes(DTYPE) for m, n, _ in BESIDE_SHAPES)}
    return (spec.m, spec.n, spec.k) not in seen and int(spec.size_bytes) not in sizes
