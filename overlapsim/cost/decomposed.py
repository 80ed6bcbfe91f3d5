"""What a GEMM cut into one piece a rank costs besides its pieces: the time that each step loses."""

from __future__ import annotations

from typing import Final

from overlapsim.cost.contention import Ranged
from overlapsim.hardware.profile import Source

# All-gather + GEMM on 8 H100, decomposed by ranks with copy engines on two streams, rows 128 to 512 a rank: time a
# step less that of its GEMM as the profile prices it, stretched as the library's serial time is over its price, and
# less what the copy beside it costs the GEMM (`overlap.OverlapSpec.speed_beside`). Mean of seven shapes.
STEP_S: Final = Ranged(
    3e-6,
    6e-6,
    16e-6,
    Source("derived", "DECOMPOSED-STEP", "medium"),
    "event, launch and pull of each piece; none to 16 us by shape, since the GEMM's own price is no better",
)
"""Between the GEMMs of consecutive shards, whatever the shapes."""
EAGER_STEP_S: Final = Ranged(
    35e-6,
    44e-6,
    80e-6,
    Source("measured", "DECOMPOSED-STEP", "medium"),
    "a gather's step from eager PyTorch takes 35 to 54 us, a scatter's about 80, however small the shapes",
)
"""Least time of a step that is launched call by call from Python; not there in a CUDA graph."""
