"""What each collective algorithm is: kinds it serves, SMs it holds, bytes it puts on every link.

Library algorithms (ring, tree, NVLS, NVLSTree, CollNet with SHARP, PAT), copy engines, the one- and two-shot
all-reduce of inference engines, and all-to-all pairwise or in two levels (each node's share once over its NIC, then
over NVLink, as DeepEP does). Ranks are symmetric: bytes depend on how many there are, not on their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Final

from overlapsim.cost.copy_engine import KINDS, NVLINK_SHARE
from overlapsim.errors import UsageError
from overlapsim.hardware.profile import Cluster
from overlapsim.hardware.topology import egress, ingress, route
from overlapsim.hardware.wire import by_node, ring_devices, ring_wire_bytes


@dataclass(frozen=True)
class Algorithm:
    """One way to run a collective.

    Attributes
    ----------
    name, title : identifier and what people call it
    kinds : collectives it serves
    one_node, many_nodes : where the library offers it
    sms : SMs (CTAs; one channel is one CTA is one SM) by architecture, ``""`` for any other
    sms_registered : the same with registered user buffers, where that is known
    efficiency : share of a link's sheet rate that its bytes reach
    """

    name: str
    title: str
    kinds: frozenset[str]
    one_node: bool
    many_nodes: bool
    sms: Mapping[str, int]
    efficiency: float
    sms_registered: int | None = None

    def num_sms(self, architecture: str, *, registered: bool = False) -> int:
        """SMs that it holds on an architecture."""
        if registered and self.sms_registered is not None:
            return self.sms_registered
        return self.sms.get(architecture, self.sms[""])


_REDUCING: Final = frozenset({"all_reduce"})
_RINGS: Final = frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast"})
_SHARDS: Final = frozenset({"all_gather", "reduce_scatter"})
# Channels (NC-CHANNELS): rings of NVSwitch nodes end with about 24, NVLS with 16 on Hopper, 24 on Blackwell and 32
# across nodes there; a tree needs 32 for what NVLSTree reaches with 16, or 4 with registered buffers (NVIDIA/nccl
# issue 1649); point-to-point channels are a power of two. DeepEP holds 24 (V1, two channels' SMs a transfer).
CATALOGUE: Final[Mapping[str, Algorithm]] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("ring", "Ring", _RINGS, True, True, {"": 24}, 0.80),
        Algorithm("tree", "Tree", _REDUCING, True, True, {"": 32}, 0.74),
        Algorithm("nvls", "NVLS", _REDUCING | _SHARDS, True, False, {"": 16, "blackwell": 24}, 0.69, 4),
        Algorithm("nvls_tree", "NVLSTree", _REDUCING, False, True, {"": 16, "blackwell": 32}, 0.67, 4),
        Algorithm("collnet", "CollNet (SHARP)", _REDUCING | _SHARDS, False, True, {"": 16}, 0.80),
        Algorithm("pat", "PAT", _SHARDS, False, True, {"": 16}, 0.60),
        Algorithm("copy_engine", "copy engines", frozenset(KINDS), True, False, {"": 0}, NVLINK_SHARE.typical),
        Algorithm("one_shot", "one-shot all-reduce", _REDUCING, True, False, {"": 36}, 0.70),
        Algorithm("two_shot", "two-shot all-reduce", _REDUCING, True, False, {"": 36}, 0.70),
        Algorithm("pairwise", "pairwise", frozenset({"all_to_all", "send_recv"}), True, True, {"": 16}, 0.70),
        Algorithm("two_level", "two-level all-to-all", frozenset({"all_to_all"}), False, True, {"": 24}, 0.80),
    )
}
"""Every algorithm by name."""


def algorithms_for(cluster: Cluster, kind: str, ranks: int) -> tuple[str, ...]:
    """Names of the algorithms that can run a collective on these ranks.

    NVLS and NVLSTree need a reducing NVSwitch, CollNet a network that reduces (never assumed: it must be forced),
    PAT one GPU a node, one- and two-shot peer access inside one node.

    Examples
    --------
    >>> from overlapsim.hardware.loading import load_cluster
    >>> algorithms_for(load_cluster("h100-sxm8"), "all_reduce", 8)
    ('ring', 'tree', 'nvls', 'one_shot', 'two_shot')
    """
    nodes = by_node(cluster, ring_devices(cluster, ranks))
    single = all(len(devices) == 1 for devices in nodes.values())
    node = cluster.node
    names = []
    for name, algorithm in CATALOGUE.items():
        if kind not in algorithm.kinds or not (algorithm.one_node if len(nodes) == 1 else algorithm.many_nodes):
            continue
        if name in ("nvls", "nvls_tree") and not node.switch_reduction:
            continue
        if name == "collnet" or (name == "pat" and not single):
            continue
        if name in ("one_shot", "two_shot", "copy_engine") and not node.p2p:
            continue
        names.append(name)
    return tuple(names)


def wire_bytes(
    cluster: Cluster,
    ranks: int | Sequence[int],
    algorithm: str,
    kind: str,
    size_bytes: float,
    *,
    dedup: float = 1.0,
) -> dict[str, float]:
    """Bytes of one collective on each link, summed over ranks.

    With S the nccl-tests size, n ranks, m of them on each of k nodes; per GPU and direction over NVLink, and per GPU
    over its NIC (together a node's NICs carry m times that):

    ============  ==================================  =======================================
    algorithm     NVLink                              NIC
    ============  ==================================  =======================================
    ring          see `ring_wire_bytes`
    tree          2 S (m-1)/m                         2 S (k-1)/k / m
    nvls          all-reduce S (1 + 1/n); gather out S/n in S; scatter out S in S/n
    nvls_tree     S (1 + 1/m)                         2 S (k-1)/k / m
    collnet       2 S (m-1)/m (half for shards)       S / m
    pat           none                                S (n-1)/n
    copy_engine   S (n-1)/n
    one_shot      S (n-1)
    two_shot      2 S (n-1)/n
    pairwise      S (m-1)/n                           S (n-m)/n
    two_level     S (m-1)/n + S (n-m)/n (m-1)/m       S (n-m)/n / dedup
    ============  ==================================  =======================================

    Parameters
    ----------
    ranks : number of ranks, or the devices themselves in any order
    algorithm, kind : of `CATALOGUE` and its kinds
    size_bytes : as nccl-tests defines it
    dedup : copies of one token that go to the same node, of which two-level sends one over the NIC

    Raises
    ------
    UsageError
        If the algorithm is unknown, does not serve the kind, or cannot run where the ranks are.
    LayoutError, ProfileError
        As `ring_wire_bytes`.
    """
    spec = checked_algorithm(algorithm, kind)
    devices = ring_devices(cluster, ranks)
    if len(devices) == 1:
        return {}
    nodes = by_node(cluster, devices)
    if not (spec.one_node if len(nodes) == 1 else spec.many_nodes):
        place = "one node" if len(nodes) == 1 else "several nodes"
        raise UsageError(f"{spec.title} does not run on {place}; choose another algorithm or other ranks")
    if algorithm == "ring" or (algorithm in ("pairwise", "copy_engine") and kind == "send_recv"):
        return ring_wire_bytes(cluster, devices, kind, size_bytes)
    if algorithm in ("nvls", "nvls_tree") and cluster.node.scale_up != "nvswitch":
        raise UsageError(f"{spec.title} needs an NVSwitch; {cluster.node.name} has {cluster.node.scale_up}")
    loads: dict[str, float] = defaultdict(float)
    for members in nodes.values():
        out, into, nic = _per_gpu(algorithm, kind, size_bytes, len(devices), len(members), len(nodes), dedup)
        if algorithm in ("nvls", "nvls_tree"):
            for device in members:
                loads[f"nvlink_out[{device}]"] += out
                loads[f"nvlink_in[{device}]"] += into
        elif len(members) > 1:
            for src, dst in permutations(members, 2):
                for link in route(cluster, src, dst):
                    loads[link] += out / (len(members) - 1)
        if nic:
            for device in members:
                for link in (*egress(cluster, device), *ingress(cluster, device)):
                    loads[link] += nic
    return {link: amount for link, amount in loads.items() if amount > 0}


def checked_algorithm(name: str, kind: str) -> Algorithm:
    """The algorithm of a name, if it serves the kind.

    Raises
    ------
    UsageError
        Otherwise.
    """
    if name not in CATALOGUE:
        raise UsageError(f"algorithm {name!r} is unknown; expected one of {', '.join(CATALOGUE)}")
    if kind not in CATALOGUE[name].kinds:
        able = [other for other, spec in CATALOGUE.items() if kind in spec.kinds]
        raise UsageError(f"{CATALOGUE[name].title} does not run {kind}; expected one of {', '.join(able)}")
    return CATALOGUE[name]


def _per_gpu(
    algorithm: str, kind: str, size: float, n: int, m: int, k: int, dedup: float
) -> tuple[float, float, float]:
    """Bytes out and in over NVLink, and each way over the NIC, of one GPU on a node with m of the n ranks."""
    tree_nic = 2 * size * (k - 1) / k / m
    pairs = 2 * size * (m - 1) / m
    remote = size * (n - m) / n
    match algorithm:
        case "tree":
            return pairs, pairs, tree_nic
        case "nvls" if kind == "all_gather":
            return size / n, size, 0.0
        case "nvls" if kind == "reduce_scatter":
            return size, size / n, 0.0
        case "nvls":
            return size * (1 + 1 / n), size * (1 + 1 / n), 0.0
        case "nvls_tree":
            return size * (1 + 1 / m), size * (1 + 1 / m), tree_nic
        case "collnet":
            share = pairs if kind == "all_reduce" else pairs / 2
            return share, share, size / m
        case "pat":
            return 0.0, 0.0, size * (n - 1) / n
        case "one_shot":
            return size * (n - 1), size * (n - 1), 0.0
        case "two_shot":
            return 2 * size * (n - 1) / n, 2 * size * (n - 1) / n, 0.0
        case "copy_engine":
            return size * (n - 1) / n, size * (n - 1) / n, 0.0
        case "pairwise":
            return size * (m - 1) / n, size * (m - 1) / n, remote
        case _:
            assert algorithm == "two_level", algorithm
            inside = size * (m - 1) / n + remote * (m - 1) / m
            return inside, inside, remote / dedup
