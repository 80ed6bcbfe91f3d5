"""What strategies with fused kernels share: templates, waits of all ranks, copies, and SMs that only communicate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal

from overlapsim.cost.base import Demand, hbm_name, hbm_rate
from overlapsim.cost.comm_ctas import comm_ctas_s
from overlapsim.cost.prices import PriceBook
from overlapsim.cost.stores import Mechanism, peer_stores
from overlapsim.hardware.profile import Cluster
from overlapsim.strategy.base import Applicability
from overlapsim.strategy.tasks import Gpu
from overlapsim.units import ps_from_s
from overlapsim.workload.operators import CollectiveOp

Template = Literal["cutlass", "triton"]
# Time of a tuned template alone over the vendor's kernel (hwprofiles/SOURCES.md, FUSED-TEMPLATE): 0.93 to 1.01 on three
# GPUs, and nothing that was not measured is taken to be faster than the library. Templates are those of the GPU's own
# architecture; one that is taken over from another is slower (``template_slowdown`` of the profile).
SLOWDOWN: Final[Mapping[Template, float]] = {"cutlass": 1.0, "triton": 1.03}
# The local sum over the ranks' parts runs on few SMs and is bound by HBM (hwprofiles/SOURCES.md, FUSED-SUM).
SUM_SMS: Final = 15
# Host calls of one fused operator, counted in the sources that run it (hwprofiles/SOURCES.md, FUSED-CALLS): a copy and
# its stream's write of a flag or wait for tiles; outputs, counters and stream joins before the kernel, and after it.
CALLS: Final = 2
CALLS_BEFORE: Final = 4
CALLS_AFTER: Final = 6
FLAG_BYTES: Final = 4


def refuse_no_peers(cluster: Cluster, ranks: int) -> Applicability | None:
    """Refusal where ranks do not reach one another's memory over NVLink or PCIe; None elsewhere."""
    node = cluster.node
    if ranks > node.num_devices:
        reason = f"{ranks} ranks span nodes of {node.num_devices} GPUs: tiles reach peers over NVLink or PCIe only"
        return Applicability(False, (reason,))
    if not node.p2p:
        reason = f"GPUs of {node.name} have no peer-to-peer access: tiles cannot reach another's memory"
        return Applicability(False, (reason,))
    return None


def as_copies(collective: CollectiveOp) -> CollectiveOp:
    """The same shares moved by copy engines: around the ring, which loads every port as an all-to-all does."""
    return CollectiveOp(
        "all_gather",
        collective.size_bytes,
        collective.ranks,
        collective.dtype,
        collective.name,
        collective.pass_,
        group=collective.group,
        engine="copy_engine",
    )


def tag_of(collective: CollectiveOp, what: str) -> str:
    """Tag of a task that is part of a collective: reports tell by its group what is exposed."""
    return f"{collective.pass_} {what}" + (f" [{collective.group}]" if collective.group else "")


def add_copies(gpu: Gpu, collective: CollectiveOp, pieces: int) -> list[int]:
    """Add the copies of all other ranks' shares, one after another."""
    op = as_copies(collective)
    seconds, demands = gpu.prices.copies(op, pieces, gpu.device)
    return [
        gpu.add_transfer(
            seconds,
            demands,
            sms=1,
            pool=gpu.copy_engine(),
            launches=CALLS,
            op=op.name,
            tag=tag_of(op, f"copy {piece}/{pieces}"),
        )
        for piece in range(1, pieces + 1)
    ]


def add_barrier(gpu: Gpu, collective: CollectiveOp, tag: str, *, inside: bool = False) -> int:
    """Add a wait of the ranks for each other: a kernel of its own, or `inside` the fused one without a launch."""
    seconds, calls = gpu.prices.barrier_s, 0 if inside else 1
    return gpu.add_transfer(seconds, launches=calls, op=collective.name, tag=tag_of(collective, tag))


def add_own_copy(gpu: Gpu, collective: CollectiveOp) -> int:
    """Add the copy of a rank's own share into the buffer that its peers read."""
    seconds, demands = gpu.prices.hbm_pass(2 * collective.size_bytes / collective.ranks)
    tag = tag_of(collective, "copy of own rows")
    return gpu.add_transfer(seconds, demands, sms=min(SUM_SMS, gpu.num_sms), op=collective.name, tag=tag)


def add_sum(gpu: Gpu, collective: CollectiveOp, *, calls: int = 1 + CALLS_AFTER) -> int:
    """Add the sum of the parts that a rank received, each as large as its share, after so many calls of the host."""
    seconds, demands = gpu.prices.hbm_pass(collective.size_bytes * (1 + 1 / collective.ranks))
    return gpu.add_transfer(
        seconds,
        demands,
        sms=min(SUM_SMS, gpu.num_sms),
        launches=calls,
        op=collective.name,
        tag=tag_of(collective, "sum of parts"),
    )


def comm_ctas(
    prices: PriceBook, collective: CollectiveOp, sms: int, how: Mechanism, *, read_bytes: float, device: int = 0
) -> tuple[float, tuple[Demand, ...]]:
    """Duration and demands of `sms` thread blocks that move what `collective` moves, reading `read_bytes` at home."""
    cluster, ranks, size, sent = prices.cluster, collective.ranks, collective.size_bytes, _sent_bytes(collective)
    pairwise = peer_stores(cluster, ranks, size, device)
    # Ends and factors of the book are those of its stores.
    moved, best = prices.stores(collective, device).seconds / pairwise.seconds, pairwise
    if collective.kind in ("all_gather", "reduce_scatter"):
        ring = peer_stores(cluster, ranks, size, device, ring=collective.kind)
        best = min(pairwise, ring, key=lambda stores: stores.seconds)
    rate = hbm_rate(prices.cluster.device)
    seconds = max(moved * comm_ctas_s(best.seconds, sent, sms, how), read_bytes / rate)
    # One demand a resource: what is written arrives from peers, what is read is sent.
    hbm = sum(d.amount for d in best.demands if d.resource == hbm_name(device)) + read_bytes
    links = tuple(d for d in best.demands if d.resource != hbm_name(device))
    return seconds, (*links, Demand(hbm_name(device), min(hbm, seconds * rate), rate))


def _sent_bytes(collective: CollectiveOp) -> float:
    return collective.size_bytes * (1 - 1 / collective.ranks)


def reserves(num_tiles: int, num_sms: int) -> tuple[int, ...]:
    """SMs worth giving to communication: those that a GEMM of whole waves leaves, for a few more waves than on all SMs.

    Any number in between costs the GEMM a wave and communication gains less of it.

    Examples
    --------
    COMET reserves 18 of an H800's SMs for 1024 tiles, 26 for 4096 and 46 for 2048 (arXiv 2502.19811):

    >>> [c in reserves(tiles, 132) for tiles, c in ((1024, 18), (4096, 26), (2048, 46))]
    [True, True, True]
    """
    least = -(-num_tiles // num_sms)
    waves = range(least, 2 * least + 2)
    found = sorted({num_sms - -(-num_tiles // wave) for wave in waves})
    found = [sms for sms in found if 0 < sms <= num_sms // 2]
    return tuple(found) or (max(1, num_sms // 8),)


def lag_ps(seconds: float) -> int:
    """A lag in the engine's unit; none for no time."""
    return ps_from_s(seconds) if seconds > 0 else 0


def whole_waves(tiles: float, sms: int) -> int:
    """Waves that so many tiles take, a tile's rounding errors forgiven."""
    return math.ceil(round(tiles / sms, 9))
