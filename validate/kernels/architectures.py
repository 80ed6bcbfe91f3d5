"""What a block may use on each GPU architecture that kernels are compiled for: shared memory, registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from overlapsim.errors import UsageError
from overlapsim.hardware.loading import load_device
from overlapsim.hardware.profile import DeviceSpec

RESERVED_BYTES: Final = 1024
"""Shared memory that each block gives to the system (CUDA C++ Programming Guide, compute capability 8.0 and later)."""
REGISTERS_PER_SM: Final = 65536
"""32-bit registers of an SM, compute capability 8.0 to 10.0 (same guide, technical specifications)."""
REGISTER_STEP: Final = 8
"""Registers of a thread are given out in steps of this many (256 a warp; CUDA occupancy calculator)."""
MOST_REGISTERS: Final = 255
"""Registers that one thread can address (same guide)."""


@dataclass(frozen=True)
class Architecture:
    """One compute capability.

    Attributes
    ----------
    sm : such as 90
    max_threads, max_blocks : of one SM (CUDA C++ Programming Guide, technical specifications)
    profile : a device of that architecture in the catalogue whose shared memory counts, if there is one
    given_bytes : shared memory of an SM where there is none (CUDA C++ Programming Guide)
    """

    sm: int
    max_threads: int
    max_blocks: int
    profile: str | None
    given_bytes: int = 0

    @property
    def name(self) -> str:
        """As the compiler calls it: ``sm_90``."""
        return f"sm_{self.sm}"

    @property
    def shared_limit_bytes(self) -> int:
        """Most shared memory of one block, bytes."""
        return self.given_bytes - RESERVED_BYTES if self.profile is None else shared_limit(load_device(self.profile))


ARCHITECTURES: Final = (
    Architecture(80, 2048, 32, "a100-sxm4-80gb"),
    # No GA10x card is in the catalogue; an SM has 100 KiB, as on Ada.
    Architecture(86, 1536, 16, None, 100 * 1024),
    Architecture(89, 1536, 24, "l40s"),
    Architecture(90, 2048, 32, "h100-sxm5-80gb"),
    Architecture(100, 2048, 32, "b200-sxm-180gb"),
)


def shared_limit(device: DeviceSpec) -> int:
    """Most shared memory of one block on a device, bytes: its SM's, less what the system keeps.

    Examples
    --------
    >>> shared_limit(load_device("a100-sxm4-80gb")) // 1024, shared_limit(load_device("l40s")) // 1024
    (163, 99)
    """
    return int(device.smem_per_sm_bytes) - RESERVED_BYTES


def architecture(name: str) -> Architecture:
    """Architecture of a name such as ``sm_90`` or ``90``.

    Raises
    ------
    UsageError
        If kernels are not compiled for it.
    """
    for known in ARCHITECTURES:
        if name.lower().removeprefix("sm_") == str(known.sm):
            return known
    raise UsageError(f"architecture {name!r}; expected one of {', '.join(a.name for a in ARCHITECTURES)}")


def blocks_per_sm(target: Architecture, *, registers: int, warps: int, shared_bytes: int) -> int:
    """Blocks of one kernel that an SM runs at once: what a wave is counted in.

    Parameters
    ----------
    registers : of one thread
    warps : of one block
    shared_bytes : of one block; the system's share is added here

    Returns
    -------
    int
        0 if not even one fits.

    Examples
    --------
    >>> blocks_per_sm(architecture("sm_80"), registers=220, warps=8, shared_bytes=65536)
    1
    """
    threads = warps * 32
    stepped = -(-registers // REGISTER_STEP) * REGISTER_STEP
    shared = (target.shared_limit_bytes + RESERVED_BYTES) // (shared_bytes + RESERVED_BYTES)
    return min(REGISTERS_PER_SM // (stepped * threads), target.max_threads // threads, target.max_blocks, shared)


def fills_registers(registers: int, warps: int) -> bool:
    """Whether one block leaves no other block a register.

    Examples
    --------
    >>> fills_registers(57, 32), fills_registers(56, 32)
    (True, False)
    """
    stepped = -(-registers // REGISTER_STEP) * REGISTER_STEP
    return stepped * warps * 32 >= REGISTERS_PER_SM
