"""Time of a collective inside one node from some twenty fitted constants a platform: for ranks that were not measured.

The tuner (`tuner`) says which branch the library takes, a fit prices it. With ``u = size x bus factor`` and ``steps``
of the ring, each branch is a latency and a rate joined by a norm: ``((base + hop steps)^p + (u / rate)^p)^(1/p)``.
Simple also copies the own shard, ``size / (ranks x copy)``, and pays fences, ``root x sqrt(u / 1 MiB)``.
Below 64 KiB the latency slides to that of the smallest messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from overlapsim.cost.tuner import PROTOCOLS, FloatArray, TunerMachine, library_choice, num_steps

Branch = Literal["ll", "ll128", "simple", "nvls"]
BRANCHES: Final[tuple[Branch, ...]] = ("ll", "ll128", "simple", "nvls")
RING_KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
PAIR_KINDS: Final = ("all_to_all", "send_recv")

RING_PARAMETERS: Final[Mapping[str, tuple[str, float, float, float]]] = {
    "small_base": ("s", 6e-6, 1e-6, 60e-6),
    "small_hop": ("s", 0.9e-6, 0.1e-6, 8e-6),
    "ll_base": ("s", 6.5e-6, 1e-6, 80e-6),
    "ll_hop": ("s", 0.95e-6, 0.1e-6, 10e-6),
    "ll_rate": ("B/s", 0.28, 0.005, 1.0),
    "ll_norm": ("ratio", 1.3, 1.0, 3.0),
    "ll128_base": ("s", 10e-6, 1e-6, 80e-6),
    "ll128_hop": ("s", 1.2e-6, 0.1e-6, 15e-6),
    "ll128_rate": ("B/s", 0.5, 0.02, 1.0),
    "ll128_norm": ("ratio", 1.2, 1.0, 3.0),
    "simple_base": ("s", 12e-6, 3e-6, 200e-6),
    "simple_hop": ("s", 1e-6, 0.1e-6, 30e-6),
    "simple_rate": ("B/s", 0.86, 0.1, 1.2),
    "simple_norm": ("ratio", 1.0, 1.0, 3.0),
    "simple_root": ("s", 4e-6, 1e-8, 60e-6),
    "copy_rate": ("B/s", 1.6, 0.2, 20.0),
    "reduce_scatter_rate_ratio": ("ratio", 1.0, 0.8, 1.25),
    "all_reduce_rate_ratio": ("ratio", 1.0, 0.8, 1.25),
    "reduce_scatter_copy_ratio": ("ratio", 1.0, 0.5, 2.0),
    "all_reduce_copy_ratio": ("ratio", 1.0, 0.5, 2.0),
    "nvls_base": ("s", 40e-6, 5e-6, 150e-6),
    "nvls_rate": ("B/s", 0.65, 0.2, 1.0),
    "nvls_norm": ("ratio", 1.0, 1.0, 3.0),
    "nvls_root": ("s", 4e-6, 1e-8, 60e-6),
}
"""Ring and NVLS constants: unit, start and bounds; rates as shares of the link's sheet rate."""
PAIR_PARAMETERS: Final[Mapping[str, tuple[str, float, float, float]]] = {
    "pair_small_base": ("s", 8e-6, 1e-6, 90e-6),
    "pair_small_hop": ("s", 0.5e-6, 0.01e-6, 10e-6),
    "pair_base": ("s", 13e-6, 1e-6, 120e-6),
    "pair_hop": ("s", 0.5e-6, 0.01e-6, 12e-6),
    "pair_onset": ("B", 32768.0, 4096.0, 262144.0),
    "pair_rate": ("B/s", 0.8, 0.02, 1.2),
    "pair_copy_rate": ("B/s", 2.5, 0.2, 200.0),
    "pair_root": ("s", 2e-6, 1e-8, 60e-6),
    "pair_norm": ("ratio", 1.3, 1.0, 3.0),
}
"""Constants of the pairwise exchange; `pair_onset` is the shard at which the library leaves the small protocol."""
FIXED_PARAMETERS: Final[Mapping[str, str]] = {"link_rate": "B/s"}
"""Not fitted: the sheet rate of the link that the constants hold for."""

_MIB: Final = float(2**20)
_SMALL: Final = float(2**12)
_PLATEAU: Final = float(2**16)
_TOP: Final = float(2**29)


@dataclass(frozen=True)
class OneNodeModel:
    """Structural model of one platform.

    Parameters
    ----------
    parameters : SI values by the names of `RING_PARAMETERS`, `PAIR_PARAMETERS` and `FIXED_PARAMETERS`; either group
        may be absent
    architecture, switch_reduction : what the tuner needs to choose
    link_bytes_per_s : sheet rate of the machine's link; a slower one than ``link_rate`` slows what runs at the
        link's rate, a faster one is not believed

    Examples
    --------
    ``OneNodeModel(fit.parameters, "hopper", 450e9, True).seconds("all_gather", 6, sizes)``
    """

    parameters: Mapping[str, float]
    architecture: str
    link_bytes_per_s: float
    switch_reduction: bool

    def prices(self, kind: str) -> bool:
        """Whether the fit holds this collective."""
        if kind in RING_KINDS:
            return "simple_rate" in self.parameters
        return kind in PAIR_KINDS and "pair_rate" in self.parameters

    @property
    def slowdown(self) -> float:
        """Link rate over that of the fit, at most 1."""
        return min(1.0, self.link_bytes_per_s / self.parameters.get("link_rate", self.link_bytes_per_s))

    def seconds(self, kind: str, ranks: int, sizes: FloatArray) -> FloatArray:
        """Times of sizes as the library runs them: the tuner's branch at fitted prices."""
        if kind in PAIR_KINDS:
            return self.pair_seconds(kind, ranks, sizes)
        return self.priced(kind, ranks, sizes, self.branches(kind, ranks, sizes))

    def branches(self, kind: str, ranks: int, sizes: FloatArray) -> NDArray[np.intp]:
        """Index into `BRANCHES` that the library takes for each size."""
        pairs, index = library_choice(self.machine(ranks), kind, sizes)
        order = np.array([3 if algorithm == "nvls" else PROTOCOLS.index(protocol) for algorithm, protocol in pairs])
        return np.asarray(order[index], dtype=np.intp)

    def machine(self, ranks: int) -> TunerMachine:
        """What the tuner sees of so many ranks in one node."""
        channels = 24 if self.architecture.startswith("blackwell") else 16
        return TunerMachine(
            self.architecture,
            "nvlink",
            self.link_bytes_per_s,
            0.0,
            ranks,
            nvls_channels=channels,
            switch_reduction=self.switch_reduction,
        )

    def priced(self, kind: str, ranks: int, sizes: FloatArray, branch: NDArray[np.intp]) -> FloatArray:
        """Times of sizes on given branches."""
        out = np.empty_like(sizes)
        for number, name in enumerate(BRANCHES):
            mask = branch == number
            if mask.any():
                out[mask] = self.branch_seconds(kind, ranks, sizes[mask], name)
        return out

    def branch_seconds(self, kind: str, ranks: int, sizes: FloatArray, branch: Branch) -> FloatArray:
        """Times of sizes on one branch, whatever the tuner would take; rising with size and falling with rate."""
        return _beyond(lambda inside: self._branch(kind, ranks, inside, branch), sizes)

    def _branch(self, kind: str, ranks: int, sizes: FloatArray, branch: Branch) -> FloatArray:
        p, steps = self.parameters, num_steps(kind, ranks)
        moved = sizes * bus_factor(kind, ranks)
        if branch == "nvls":
            # What each GPU puts on its links where the switch reduces: bus bandwidth then rises with the ranks
            # (8 GiB on 5 to 8 H200 reads 414 to 473 GB/s, of which this makes one rate of 304 to 310).
            moved = sizes * (1 + 1 / ranks)
            joined = _norm(p["nvls_base"], moved / (p["nvls_rate"] * self.slowdown), p["nvls_norm"])
            return joined + p["nvls_root"] * np.sqrt(moved / _MIB)
        ratio, copy = p.get(f"{kind}_rate_ratio", 1.0), p.get(f"{kind}_copy_ratio", 1.0)
        link = p["simple_rate"] * ratio * self.slowdown
        if branch == "simple":
            latency = p["simple_base"] + p["simple_hop"] * steps
            work = moved / link + sizes / (ranks * p["copy_rate"] * copy)
            return _norm(latency, work, p["simple_norm"]) + p["simple_root"] * np.sqrt(moved / _MIB)
        rate = min(p[f"{branch}_rate"], link) if self.slowdown < 1.0 else p[f"{branch}_rate"]
        latency = p[f"{branch}_base"] + p[f"{branch}_hop"] * steps
        if branch == "ll128":
            return _norm(latency, moved / rate, p["ll128_norm"])
        small = p["small_base"] + p["small_hop"] * steps
        return _norm(_slide(small, latency, sizes, _SMALL, _PLATEAU), moved / rate, p["ll_norm"])

    def pair_seconds(self, kind: str, ranks: int, sizes: FloatArray) -> FloatArray:
        """Times of sizes of the pairwise exchange; ``send_recv`` is one pair that moves the whole size."""
        return _beyond(lambda inside: self._pair(kind, ranks, inside), sizes)

    def _pair(self, kind: str, ranks: int, sizes: FloatArray) -> FloatArray:
        p = self.parameters
        peers = ranks - 1 if kind == "all_to_all" else 1
        shard = sizes / ranks if kind == "all_to_all" else sizes
        moved = shard * peers
        own = shard if kind == "all_to_all" else 0.0 * sizes
        small = p["pair_small_base"] + p["pair_small_hop"] * peers
        onset = p["pair_onset"]
        latency = _slide(small, p["pair_base"] + p["pair_hop"] * peers, shard, onset / 2, onset * 2)
        work = moved / (p["pair_rate"] * self.slowdown) + own / p["pair_copy_rate"]
        return _norm(latency, work, p["pair_norm"]) + p["pair_root"] * np.sqrt(moved / _MIB)

    def latency_s(self, kind: str, ranks: int) -> float:
        """Time of the smallest message."""
        return float(self.seconds(kind, ranks, np.array([1.0]))[0])


def bus_factor(kind: str, ranks: int) -> float:
    """Bytes that each rank sends to its neighbour over the size, as nccl-tests counts the bus.

    Examples
    --------
    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("broadcast", 8)
    (1.75, 0.875, 1.0)
    """
    if kind == "all_reduce":
        return 2.0 * (ranks - 1) / ranks
    return 1.0 if kind in ("broadcast", "send_recv") else (ranks - 1) / ranks


def _beyond(price: Callable[[FloatArray], FloatArray], sizes: FloatArray) -> FloatArray:
    """Above the largest fitted size the slope of the last octave goes on: the root term must not fade away.

    On 8 H200 at 8 GiB that is 366 GB/s of ring bus bandwidth, measured 363; the bare formula says 385.
    """
    seconds = price(np.minimum(sizes, _TOP))
    if (sizes > _TOP).any():
        half, full = price(np.array([_TOP / 2, _TOP]))
        seconds = seconds + np.maximum(sizes - _TOP, 0.0) * (full - half) / (_TOP / 2)
    return seconds


def _slide(low: float, high: float, sizes: FloatArray, start: float, end: float) -> FloatArray:
    """From `low` up to `start` to `high` from `end`, straight in log size; never falls."""
    share = np.clip(np.log2(np.maximum(sizes, 1.0) / start) / np.log2(end / start), 0.0, 1.0)
    return np.asarray(low + max(0.0, high - low) * share, dtype=np.float64)


def _norm(latency: float | FloatArray, work: FloatArray, p: float) -> FloatArray:
    if p == 1.0:
        return np.asarray(latency + work)
    high = np.maximum(latency, work)
    # Scaled by the larger one, so that powers of seconds neither under- nor overflow.
    return np.asarray(high * ((latency / high) ** p + (work / high) ** p) ** (1 / p))
