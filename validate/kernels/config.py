"""Shape of a GEMM kernel: tile, stages and warps, as an operator plan states them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from overlapsim.errors import PlanError, StrategyError

LEAST_SIDE: Final = 16
"""Shortest side of a tile: what one tensor-core instruction takes."""
MOST_ELEMENTS: Final = 256 * 256
"""Largest tile of C: more does not fit the registers of eight warps."""
WIDE_TILE: Final = 128 * 128
"""Tiles of so many elements get eight warps: with four, 255 registers a thread do not suffice and some spill."""
MAX_STAGES: Final = 8
DTYPES: Final = ("fp16", "bf16", "fp32", "tf32")
"""Types of the operands: `tf32` is fp32 in memory, multiplied on tensor cores."""


@dataclass(frozen=True)
class GemmConfig:
    """One GEMM kernel.

    Attributes
    ----------
    bm, bn, bk : elements of a tile of C and of one step along K; powers of two, at least 16
    stages : steps in flight between memory and tensor cores
    num_warps : of one CTA; 0 chooses by the tile
    accumulate : ``fp32``, or ``fp16`` for fp16 operands

    Raises
    ------
    StrategyError
        If a kernel of that shape cannot be built.

    Examples
    --------
    >>> GemmConfig(128, 128, 64).num_warps, GemmConfig(64, 128, 64).num_warps
    (8, 4)
    """

    bm: int
    bn: int
    bk: int
    stages: int = 3
    num_warps: int = 0
    accumulate: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("bm", "bn", "bk"):
            value = getattr(self, name)
            if value < LEAST_SIDE or value & (value - 1):
                raise StrategyError(
                    f"tile of {self.bm}x{self.bn}x{self.bk}: {name} is {value}; expected a power of two of at least "
                    f"{LEAST_SIDE}: plan with another tile"
                )
        if self.bm * self.bn > MOST_ELEMENTS:
            raise StrategyError(f"tile of {self.bm}x{self.bn}; expected at most {MOST_ELEMENTS} elements of C")
        if not 1 <= self.stages <= MAX_STAGES:
            raise StrategyError(f"{self.stages} stages; expected 1 to {MAX_STAGES}")
        if self.accumulate not in ("fp32", "fp16"):
            raise StrategyError(f"accumulate is {self.accumulate!r}; expected fp32 or fp16")
        if not self.num_warps:
            object.__setattr__(self, "num_warps", 8 if self.bm * self.bn >= WIDE_TILE else 4)
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise StrategyError(f"{self.num_warps} warps; expected 1, 2, 4, 8 or 16")

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> GemmConfig:
        """Read the kernel of an operator plan's settings (docs/plan.md).

        Raises
        ------
        PlanError
            If ``bm bn bk stages`` are not there.
        StrategyError
            If a kernel of that shape cannot be built.
        """
        sizes: dict[str, int] = {}
        for name in ("bm", "bn", "bk", "stages"):
            value = settings.get(name)
            if type(value) is not int:
                raise PlanError(f"{name} in the plan's settings is {value!r}; expected a whole number: plan again")
            sizes[name] = value
        return cls(**sizes, accumulate=str(settings.get("accumulate", "fp32")))
