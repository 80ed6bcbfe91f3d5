"""How much computation and communication disturb one another: published figures as ranges, with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from overlapsim.errors import UsageError
from overlapsim.hardware.profile import DeviceSpec, Source
from overlapsim.workload.operators import CollectiveKind, Engine


@dataclass(frozen=True)
class Ranged:
    """A number on which sources disagree.

    Attributes
    ----------
    low, typical, high : ``low <= typical <= high``; a measured figure at the ends, a mean or middle between
    source : where they are from
    note : what disagrees
    """

    low: float
    typical: float
    high: float
    source: Source
    note: str = ""

    def __post_init__(self) -> None:
        assert self.low <= self.typical <= self.high, "a range must be ordered"


def _published(reference: str) -> Source:
    return Source("measured", reference, "medium")


COMPUTE_SLOWDOWN: Final = Ranged(
    1.0, 1.19, 1.40, _published("INTERFERE"), "mean and maximum of 4 GPU types; a part is SMs taken, a part HBM shared"
)
"""Time of computation beside communication over its time alone, SMs and memory together."""
SEND_RECV_SLOWDOWN: Final = Ranged(
    1.0, 1.3, 2.0, _published("OVL-NC1433"), "one-CTA send/recv beside a GEMM that leaves SMs free: HBM and L2, not SMs"
)
"""Time of small-CTA communication beside a GEMM over its time alone."""
SUSTAINED_CLOCK: Final = Ranged(
    0.80,
    0.92,
    1.0,
    Source("prior", "OVL-CLOCK", "low"),
    "random data cost 13 % on a 400 W A100; long H100 training runs imply 0.8, microbenchmarks 1.0",
)
"""Clock of a long power-limited run over that of a short benchmark."""
CLUSTER_IDLE_SMS: Final = Ranged(
    0, 4, 11, _published("OVL-F339078"), "108-SM cap beside 24 CTAs on 132 SMs left 11 idle: cluster and GPC shapes"
)
"""SMs that neither kernel gets when a GEMM with thread-block clusters is capped."""
EXTRA_WAVE_RATE: Final = Ranged(
    0.5, 0.59, 1.0, _published("OVL-F337991"), "132-CTA GEMM beside a 24-CTA all-gather: MFU 80 % to 47 %"
)
"""Rate of a one-wave GEMM once stolen SMs give it a second one; the wave model reproduces it from the SM count."""

# CTAs, each an SM, that one communication holds, by what moves the bytes and the GPU's architecture. NCCL ends with 24
# channels on NVSwitch nodes and 16 on Blackwell from 2.28; NVLS with 16 and 24; libraries of expert parallelism take
# 6 to 64; tensor-parallel userbuffers 2 to 32. All can be capped, so these are inputs, not laws.
STOLEN_SMS: Final[Mapping[tuple[Engine, str], Ranged]] = {
    ("kernel", ""): Ranged(
        2, 24, 32, _published("NC-CHANNELS"), "2 on PCIe nodes with NCCL 2.18, 24 to 32 on NVSwitch"
    ),
    ("kernel", "blackwell"): Ranged(16, 16, 32, _published("NB28"), "default ceiling 32 before NCCL 2.28, 16 since"),
    ("nvls", ""): Ranged(4, 16, 24, _published("NC-NVLS"), "16 on Hopper; 4 to 6 with registered buffers"),
    ("nvls", "blackwell"): Ranged(4, 24, 32, _published("NC-NVLS"), "24 in one NVLink domain, 32 across nodes"),
    ("copy_engine", ""): Ranged(0, 0, 0, _published("NB28"), "copy engines hold no SM and cannot reduce"),
}
EXPERT_SMS: Final = Ranged(6, 20, 64, _published("DEEPEP"), "20 of 132 in DeepSeek-V3, 24 in V1, 6-12 and 24-64 in V2")
"""SMs of expert dispatch and combine kernels."""
USERBUFFER_SMS: Final = Ranged(2, 16, 32, _published("NEMO-TP"), "2 to 32 by layer in one published configuration")
"""SMs of tensor-parallel overlap with user buffers."""

# HBM bytes per byte that a GPU sends. A ring step reads what it sends and the buffer it adds to, and writes what it
# receives; a switch that reduces leaves one read and one write; copy engines read and write once.
HBM_PER_WIRE: Final[Mapping[tuple[Engine, str], Ranged]] = {
    ("kernel", "reduce_scatter"): Ranged(2.0, 3.0, 3.0, Source("derived", "DERIVED-HBM", "medium")),
    ("kernel", "all_reduce"): Ranged(2.0, 2.5, 3.0, Source("derived", "DERIVED-HBM", "medium")),
    ("kernel", ""): Ranged(2.0, 2.0, 2.0, Source("derived", "DERIVED-HBM", "medium")),
    ("nvls", ""): Ranged(1.0, 1.5, 2.0, Source("prior", "DERIVED-HBM", "low"), "less than a ring's; not measured"),
    ("copy_engine", ""): Ranged(2.0, 2.0, 2.0, Source("derived", "DERIVED-HBM", "medium")),
}


def stolen_sms(device: DeviceSpec, engine: Engine = "kernel") -> Ranged:
    """SMs that a collective holds beside a kernel on this device, never more than it has."""
    family = "blackwell" if device.architecture.startswith("blackwell") else ""
    found = STOLEN_SMS.get((engine, family)) or STOLEN_SMS.get((engine, ""))
    if found is None:
        raise UsageError(f"communication engine {engine!r} is unknown; expected kernel, nvls or copy_engine")
    most = float(device.num_sms)
    return Ranged(min(found.low, most), min(found.typical, most), min(found.high, most), found.source, found.note)


def hbm_per_wire_byte(kind: CollectiveKind, engine: Engine = "kernel") -> Ranged:
    """HBM bytes per byte sent, for one collective.

    Raises
    ------
    UsageError
        If copy engines are asked to reduce, or the engine is unknown.
    """
    if engine == "copy_engine" and kind in ("all_reduce", "reduce_scatter"):
        raise UsageError(f"copy engines cannot reduce, so they cannot run {kind}; expected all_gather, all_to_all ...")
    found = HBM_PER_WIRE.get((engine, kind)) or HBM_PER_WIRE.get((engine, ""))
    if found is None:
        raise UsageError(f"communication engine {engine!r} is unknown; expected kernel, nvls or copy_engine")
    return found


def compute_slowdown(device: DeviceSpec, op: str = "gemm", beside: str = "all_reduce") -> Ranged:
    """Time of `op` beside a collective over its time alone: the device's own measurement, or the published range.

    Parameters
    ----------
    device : its fit ``contention.<op>_beside_<beside>`` (parameter ``slowdown``) comes first
    op, beside : what is slowed, and by what
    """
    fit = device.fits.get(f"contention.{op}_beside_{beside}")
    if fit is None:
        return COMPUTE_SLOWDOWN
    typical = fit.parameters["slowdown"]
    low, high = fit.spread.get("all", (0.95, 1.05))
    return Ranged(typical * min(low, 1.0), typical, typical * max(high, 1.0), fit.source, fit.notes)
