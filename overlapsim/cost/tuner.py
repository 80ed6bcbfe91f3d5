"""The library tuner's own cost model: which algorithm and protocol NCCL picks. It chooses; it does not price.

Published formulas and constants of NCCL 2.30.7 (hwprofiles/SOURCES.md, NC). For each pair of algorithm and protocol
``time = latency + bytes / bandwidth``; the least time wins. As times these are 20 to 45 % off, as choices they are
right at the sizes where measured curves jump, which a minimum over fitted costs is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from overlapsim.errors import UsageError

FloatArray = NDArray[np.float64]
TunedAlgorithm = Literal["ring", "tree", "nvls", "nvls_tree", "collnet_direct", "collnet_chain", "pat"]
Protocol = Literal["ll", "ll128", "simple"]
TUNED: Final[tuple[TunedAlgorithm, ...]] = (
    *("ring", "tree", "nvls", "nvls_tree", "collnet_direct", "collnet_chain", "pat"),
)
PROTOCOLS: Final[tuple[Protocol, ...]] = ("ll", "ll128", "simple")

_US: Final = 1e-6
_GB: Final = 1e9
# By protocol LL, LL128, Simple.
_BASE_US: Final[Mapping[str, tuple[float, float, float]]] = {
    "tree": (6.8, 14.0, 8.4),
    "ring": (6.6, 14.0, 8.4),
    "pat": (8.0, 8.0, 8.0),
}
_HOP_US: Final[Mapping[str, Mapping[str, tuple[float, float, float]]]] = {
    "nvlink": {
        "tree": (0.6, 1.25, 4.0),
        "ring": (0.6, 1.9, 3.4),
        "collnet_direct": (0.0, 0.0, 3.7),
        "collnet_chain": (0.0, 0.0, 2.8),
        "nvls": (0.0, 0.0, 25.0),
        "nvls_tree": (0.0, 0.0, 25.0),
        "pat": (0.0, 0.0, 4.0),
    },
    "pci": {
        "tree": (1.0, 1.9, 4.0),
        "ring": (1.0, 2.5, 5.7),
        "collnet_direct": (0.0, 0.0, 3.7),
        "collnet_chain": (0.0, 0.0, 2.8),
        "nvls": (0.0, 0.0, 0.0),
        "nvls_tree": (0.0, 0.0, 0.0),
        "pat": (0.0, 0.0, 4.0),
    },
    "net": {
        "tree": (5.0, 8.5, 14.0),
        "ring": (2.7, 4.0, 14.0),
        "collnet_direct": (0.0, 0.0, 31.0),
        "collnet_chain": (0.0, 0.0, 30.0),
        "nvls": (0.0, 0.0, 18.0),
        "nvls_tree": (0.0, 0.0, 20.9),
        "pat": (0.0, 0.0, 14.0),
    },
}
# GB/s on 1, 2 and 4 or more nodes.
_LL_CAP: Final[Mapping[str, tuple[float, float, float]]] = {
    "volta": (39.0, 39.0, 20.4),
    "ampere": (87.7, 22.5, 19.0),
    "hopper": (141.0, 45.0, 35.0),
    "blackwell": (282.0, 90.0, 70.0),
}
_PER_CHANNEL: Final[Mapping[tuple[str, str], Mapping[str, tuple[float, float, float]]]] = {
    ("ring", "ll128"): {
        "volta": (20.0, 20.0, 20.0),
        "ampere": (20.0, 20.0, 20.0),
        "hopper": (36.7, 36.7, 36.7),
        "blackwell": (40.0, 40.0, 40.0),
    },
    ("tree", "ll128"): {
        "volta": (20.0, 20.0, 20.0),
        "ampere": (20.0, 20.0, 20.0),
        "hopper": (36.7, 36.7, 29.0),
        "blackwell": (55.6, 31.67, 20.0),
    },
    ("tree", "simple"): {
        "volta": (26.5, 18.5, 10.0),
        "ampere": (24.0, 23.6, 17.8),
        "hopper": (38.7, 41.4, 36.0),
        "blackwell": (70.0, 42.8, 24.0),
    },
    ("nvls_tree", "simple"): {"hopper": (0.0, 57.7, 45.5), "blackwell": (0.0, 96.0, 80.0)},
}
_NVLS_EFFICIENCY: Final[Mapping[str, float]] = {"hopper": 0.85, "blackwell": 0.74}
# Of the sheet's NVLink rate, what the library counts on: 20 of 25, 20.6 of 25 and 40.1 of 50 GB/s a link.
_USABLE: Final[Mapping[str, float]] = {"volta": 0.8, "ampere": 0.8, "hopper": 0.824, "blackwell": 0.802}
# Published: 0.92 everywhere. On Blackwell the measured switch of all-gather (8 to 16 MiB at 8 ranks) and of the
# ring all-reduce (16 to 32 MiB) ask for 0.80, two bounds that leave 0.77 to 0.81: a fitted switch.
_LL128_SHARE: Final[Mapping[str, float]] = {"blackwell": 0.8}
# Fewest ranks from which NVLS beats the ring in the library's eyes: 5 on H200, 6 on B200 (SOURCES.md, S).
_NVLS_MIN_RANKS: Final[Mapping[str, int]] = {"hopper": 5, "blackwell": 6}
# Correction of tree bandwidth at 64 B, 128 B ... 512 MiB.
_TREE_CORRECTION: Final[Mapping[str, tuple[float, ...]]] = {
    "ll": (
        *(1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5),
        *(0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0),
    ),
    "ll128": (
        *(1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6),
        *(0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0, 1.0),
    ),
    "simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5),
        *(0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9),
    ),
}


@dataclass(frozen=True)
class TunerMachine:
    """What the tuner knows of a communicator.

    Attributes
    ----------
    architecture : volta, ampere, hopper or blackwell
    link : nvlink or pci, inside a node
    intra_bytes_per_s : rate of all channels together inside a node, per GPU and direction, as the sheet says
    inter_bytes_per_s : rate of a node's NICs together, per direction
    ranks, nodes : of the communicator; ranks divide by nodes
    channels, nvls_channels : of rings and trees, and of NVLS
    switch_reduction : the NVSwitch reduces (NVLS)
    collnet : a network that reduces (SHARP)
    net_overhead_s : 1 us on Intel hosts, 2 on AMD
    """

    architecture: str
    link: Literal["nvlink", "pci"]
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    ranks: int
    nodes: int = 1
    channels: int = 24
    nvls_channels: int = 16
    switch_reduction: bool = False
    collnet: bool = False
    net_overhead_s: float = 1e-6

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.nodes < 1 or self.ranks % self.nodes:
            raise UsageError(f"{self.ranks} ranks on {self.nodes} node(s); expected a multiple of the nodes, >= 1")

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one node."""
        return self.ranks // self.nodes

    @property
    def family(self) -> str:
        """Architecture whose constants hold: ada counts as ampere, unknown ones as hopper."""
        return _family(self.architecture)

    def ring_bytes_per_s(self) -> float:
        """Bus bandwidth of ring and Simple: usable links inside a node, NICs between more than two."""
        inside = self.intra_bytes_per_s * (_USABLE[self.family] if self.link == "nvlink" else 1.0)
        return inside if self.nodes == 1 else min(inside, self.inter_bytes_per_s) if self.nodes > 2 else inside


_KIN: Final[Mapping[str, str]] = {"ada": "ampere", "turing": "volta", "blackwell_ultra": "blackwell"}


def _family(architecture: str) -> str:
    return _KIN.get(architecture, architecture if architecture in _LL_CAP else "hopper")


def channel_bytes_per_s(architecture: str) -> float:
    """Bus bytes/s that one channel of a ring, hence one CTA, moves inside a node at most (LL128).

    Examples
    --------
    >>> channel_bytes_per_s("ampere") / 1e9, channel_bytes_per_s("hopper") / 1e9
    (20.0, 36.7)
    """
    return _PER_CHANNEL["ring", "ll128"][_family(architecture)][0] * _GB


def num_steps(kind: str, ranks: int) -> int:
    """Messages of a ring that wait for one another (of a pairwise exchange for all_to_all).

    Examples
    --------
    >>> num_steps("all_reduce", 8), num_steps("all_gather", 8)
    (14, 7)
    """
    if kind == "all_reduce":
        return 2 * (ranks - 1)
    return min(1, ranks - 1) if kind == "send_recv" else ranks - 1


def available(machine: TunerMachine, kind: str, algorithm: TunedAlgorithm, protocol: Protocol) -> bool:
    """Whether the library offers the pair, by its own rules."""
    if algorithm == "ring":
        return protocol != "ll128" or machine.link == "nvlink"
    if algorithm == "tree":
        return kind == "all_reduce" and (protocol != "ll128" or machine.link == "nvlink")
    if protocol != "simple":
        return False
    if algorithm == "nvls":
        enough = machine.ranks_per_node >= _NVLS_MIN_RANKS.get(machine.family, 99)
        # All-gather and reduce-scatter take it with registered buffers only; several nodes need a network that reduces.
        return machine.switch_reduction and kind == "all_reduce" and enough and (machine.nodes == 1 or machine.collnet)
    if algorithm == "nvls_tree":
        return machine.switch_reduction and kind == "all_reduce" and machine.nodes > 1
    if algorithm == "pat":
        return kind in ("all_gather", "reduce_scatter") and machine.ranks_per_node == 1 and machine.nodes > 1
    if algorithm == "collnet_direct":
        return machine.collnet and machine.nodes > 1 and kind in ("all_reduce", "all_gather", "reduce_scatter")
    return machine.collnet and machine.nodes > 1 and kind == "all_reduce"


def bus_bytes_per_s(machine: TunerMachine, kind: str, algorithm: TunedAlgorithm, protocol: Protocol) -> float:
    """Bus bandwidth that the tuner counts on for one pair."""
    family, column = machine.family, 0 if machine.nodes == 1 else 1 if machine.nodes < 4 else 2
    ring = machine.ring_bytes_per_s()
    ll_cap = _LL_CAP[family][column] * _GB

    def per_channel(proto: str) -> float:
        return machine.channels * _PER_CHANNEL[algorithm, proto][family][column] * _GB

    if algorithm == "ring":
        if protocol == "ll":
            return min(ll_cap, ring / 2)
        share = _LL128_SHARE.get(family, 0.92) if machine.nodes == 1 else 0.92
        return ring if protocol == "simple" else min(share * ring, per_channel("ll128"))
    if algorithm == "tree":
        simple = min(0.92 * ring, per_channel("simple"))
        if protocol == "ll":
            return min(simple / 3.8, ll_cap)
        if protocol == "ll128":
            return min(simple * (7 / 9 if machine.nodes == 1 else 120 / 128), per_channel("ll128"))
        return simple
    if algorithm == "pat":
        return 0.75 * ring
    if algorithm == "nvls":
        full = ring * _NVLS_EFFICIENCY[family] * (machine.nvls_channels - 1) / machine.nvls_channels
        return full * (2 if kind == "all_reduce" else 1)
    if algorithm == "nvls_tree":
        caps = _PER_CHANNEL["nvls_tree", "simple"].get(family, (0.0, 0.0, 0.0))
        return machine.nvls_channels * caps[column] * _GB
    # CollNet: one copy of the data per NIC and direction.
    if kind != "all_reduce":
        return machine.ranks_per_node * min(ring, 0.9 * machine.inter_bytes_per_s)
    return machine.inter_bytes_per_s * (0.85 if family in ("hopper", "blackwell") else 1.0)


def latency_s(machine: TunerMachine, kind: str, algorithm: TunedAlgorithm, protocol: Protocol) -> float:
    """Latency that the tuner counts on for one pair."""
    at = PROTOCOLS.index(protocol)
    intra = _HOP_US[machine.link][algorithm][at]
    inter = _HOP_US["net"][algorithm][at]
    nodes, inside = machine.nodes, machine.ranks_per_node
    depth = math.log2(nodes)
    base = _BASE_US.get(algorithm, (0.0, 0.0, 0.0))[at]
    if algorithm == "ring":
        steps = num_steps(kind, machine.ranks)
        between = 0 if nodes == 1 else (2 if kind == "all_reduce" else 1) * (nodes - 1)
        overhead = 0.0 if nodes == 1 else machine.net_overhead_s / _US * (3 if protocol == "simple" else 1)
        total = base + (steps - between) * max(intra, overhead) + between * inter
        return _US * total * (1.4 if protocol == "simple" and kind == "all_reduce" and nodes > 1 else 1.0)
    if algorithm == "tree":
        return _US * (base + 2 * ((inside - 1) * intra + depth * inter))
    if algorithm == "nvls":
        return _US * (intra + (inter if nodes > 1 else 0.0))
    if algorithm == "nvls_tree":
        return _US * (base + intra + 2 * depth * inter)
    if algorithm == "collnet_direct":
        return _US * (2 * (intra + 0.4 * (inside - 1)) + inter)
    if algorithm == "collnet_chain":
        return _US * (2 * (inside - 1) * intra + inter)
    return _US * (base + depth * inter / 3.5 + 2.8 * machine.ranks)


def estimate_s(
    machine: TunerMachine, kind: str, algorithm: TunedAlgorithm, protocol: Protocol, size_bytes: ArrayLike
) -> FloatArray:
    """The tuner's time of one pair; infinite where the library does not offer it.

    Examples
    --------
    >>> dgx = TunerMachine("ampere", "nvlink", 300e9, 200e9, ranks=8)
    >>> float(estimate_s(dgx, "all_gather", "ring", "ll", 0.0)) * 1e6
    10.8
    """
    sizes = np.asarray(size_bytes, dtype=np.float64)
    if not available(machine, kind, algorithm, protocol):
        return np.full(sizes.shape, np.inf)
    n = machine.ranks
    bus = bus_bytes_per_s(machine, kind, algorithm, protocol)
    # Bus to algorithm bandwidth: by ring steps for ring, NVLS and NVLSTree, halved for the others.
    steps = n if kind in ("broadcast", "send_recv") else num_steps(kind, n)
    rate = bus * (n / steps if algorithm in ("ring", "nvls", "nvls_tree", "pat") else 0.5)
    if algorithm == "tree":
        octave = np.clip(np.floor(np.log2(np.maximum(sizes, 64.0))).astype(np.intp) - 6, 0, 23)
        table = np.asarray(_TREE_CORRECTION[protocol])
        slowed = np.where(sizes < 64.0 * 2**23, table[octave], 1.0)
        return latency_s(machine, kind, algorithm, protocol) + sizes / (rate * slowed)
    return latency_s(machine, kind, algorithm, protocol) + sizes / rate


def library_choice(
    machine: TunerMachine, kind: str, size_bytes: ArrayLike
) -> tuple[tuple[tuple[TunedAlgorithm, Protocol], ...], NDArray[np.intp]]:
    """The pair that the library picks for each size.

    Returns
    -------
    pairs : the pairs offered
    index : into `pairs`, one for each size, of its shape

    Examples
    --------
    >>> dgx = TunerMachine("ampere", "nvlink", 300e9, 200e9, ranks=4)
    >>> pairs, index = library_choice(dgx, "all_gather", [2**20, 2**21])
    >>> [pairs[i] for i in index]
    [('ring', 'll'), ('ring', 'simple')]
    """
    pairs = tuple((a, p) for a in TUNED for p in PROTOCOLS if available(machine, kind, a, p))
    times = np.stack([estimate_s(machine, kind, a, p, size_bytes) for a, p in pairs])
    return pairs, np.argmin(times, axis=0)
