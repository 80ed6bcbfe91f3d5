"""What copy engines take to move a collective: whole pieces, each with a start of its own, and no SM."""

from __future__ import annotations

from typing import Final

import numpy as np

from overlapsim.cost.contention import Ranged
from overlapsim.cost.curve import FloatArray
from overlapsim.hardware.bounds import wire_lower_bound_s
from overlapsim.hardware.profile import Cluster, Source
from overlapsim.hardware.wire import bottleneck, ring_wire_bytes

KINDS: Final = ("all_gather", "all_to_all", "send_recv")
"""What copy engines can run: they move bytes and add nothing."""
# 1 GB in one piece: 368.82 of 450 GB/s on H100, 726.13 of 900 on B200 (hwprofiles/SOURCES.md, PK). The profile's PCIe
# rate is what a large copy reaches already.
NVLINK_SHARE: Final = Ranged(0.80, 0.82, 0.85, Source("measured", "PK", "high"), "0.82 on H100, 0.81 on B200")
# With the base of a collective, what makes an all-gather of 8 MiB over 8 H100 as fast as the library's kernel: its
# threshold for copy engines. At 8 us that gather would take 1.7 times as long as the kernel. Pieces of 256 MB at 80 %
# of the link, where 1 GB reaches 82 %, allow up to 23 us: of a piece that large.
PIECE_S: Final = Ranged(
    2e-6, 3e-6, 8e-6, Source("derived", "DERIVED-CE", "medium"), "8 us: that gather at 1.7 times the kernel"
)
_REFERENCE: Final = 2.0**30


def copy_engine_pieces(kind: str, ranks: int) -> int:
    """Copies that one rank starts: one for each peer, or the one to its neighbour.

    Examples
    --------
    >>> copy_engine_pieces("all_gather", 8), copy_engine_pieces("send_recv", 2)
    (7, 1)
    """
    return 1 if kind == "send_recv" else ranks - 1


def copy_engine_seconds(
    cluster: Cluster,
    kind: str,
    ranks: int,
    sizes: FloatArray,
    *,
    piece_s: float = PIECE_S.typical,
    share: float = NVLINK_SHARE.typical,
    base: bool = True,
    pieces: int | None = None,
) -> FloatArray:
    """Time of one collective by copy engines: base, a start for each piece, bytes over the busiest link.

    Model ``base + pieces * piece_s + bytes / rate``; the rate is `share` of NVLink, or a PCIe link's. Pieces go one
    after another (one engine for each direction), in ring order, so that no two ranks read one peer at once.

    Parameters
    ----------
    kind : one of `KINDS`
    ranks : 2 or more, on the first devices of one node
    sizes : nccl-tests sizes, bytes, any shape
    piece_s, share : of a piece, and of NVLink
    base : False leaves the collective's base out: who starts the copies also waits for the peers
    pieces : copies that each rank starts; one for each peer (`copy_engine_pieces`) when None

    Returns
    -------
    FloatArray
        Seconds, never below what the wires allow.

    Examples
    --------
    >>> from overlapsim.hardware.loading import load_cluster
    >>> h100 = load_cluster("h100-sxm8")
    >>> float(1e9 / copy_engine_seconds(h100, "send_recv", 2, np.array(1e9)) / 1e9).__round__()
    368
    """
    loads = ring_wire_bytes(cluster, ranks, kind, _REFERENCE)
    worst = bottleneck(cluster, loads)
    reach = share if worst.link.startswith("nvlink") else 1.0
    bound = wire_lower_bound_s(cluster, ranks, kind, _REFERENCE)
    per_byte = max(worst.time_s / reach, bound) / _REFERENCE
    count = copy_engine_pieces(kind, ranks) if pieces is None else pieces
    start_s = count * piece_s + (cluster.collectives.base_s if base else 0.0)
    return np.asarray(start_s + np.asarray(sizes, dtype=np.float64) * per_byte, dtype=np.float64)
