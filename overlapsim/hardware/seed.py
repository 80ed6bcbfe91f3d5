"""A cluster profile from what a machine prints about itself and the bundled machine that is nearest to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import yaml

from overlapsim.errors import ProfileError
from overlapsim.hardware.profile import Cluster
from overlapsim.hardware.topo_matrix import DISTANCES, TopoMatrix

NVLINK_BYTES_PER_S: Final = {
    "volta": 25e9,
    "ampere": 25e9,
    "hopper": 25e9,
    "blackwell": 50e9,
    "blackwell_ultra": 50e9,
}
"""Rate of one NVLink and direction by architecture (hwprofiles/SOURCES.md: V, A, H, B, B3)."""
MOST_NVLINKS: Final = {"volta": 6, "ampere": 12, "hopper": 18, "blackwell": 18, "blackwell_ultra": 18}


def seed_profile(topo: TopoMatrix, base: Cluster, origin: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Content of a cluster file that extends `base` by what the matrix says.

    The matrix has no rates of PCIe, host memory and NICs: they stay the base's. Curves and fits of the base stay
    only if NVLink is the same.

    Parameters
    ----------
    topo : TopoMatrix
        The machine.
    base : Cluster
        Bundled cluster of the same device.
    origin : str
        File the matrix was read from, which becomes the source of its numbers.

    Returns
    -------
    profile : dict
        For a YAML file; ``node`` stands inline.
    remarks : tuple of str
        What was taken over, left out or cannot be known from the matrix.

    Raises
    ------
    ProfileError
        If NVLinks are there and the device's architecture has no known link rate.
    """
    count = len(topo.gpus)
    node: dict[str, Any] = {"extends": base.node.name, "num_devices": _leaf(count, "count", origin)}
    remarks = [f"rates of PCIe, host memory, NICs and the network are those of {base.name}; measure or replace them"]
    links = _nvlinks(topo)
    node.update(_scale_up(links, count, base, origin))
    pcie, numa = _pcie_groups(topo, base, remarks), _numa_groups(topo, remarks)
    node["pcie_groups"] = _leaf(pcie, "devices", origin)
    node["numa_groups"] = _leaf(numa, "devices", origin)
    node.update(_nics(topo, origin, remarks))
    if node["scale_up"] == "pcie":
        node["p2p"] = base.node.p2p
        remarks.append(f"p2p is {base.name}'s; `nvidia-smi topo -p2p r` says whether GPUs read each other")
    profile: dict[str, Any] = {"kind": "cluster", "extends": base.name, "node": node}
    if base.node.num_devices > count:
        remarks.append(f"{base.name} has {base.node.num_devices} GPUs a node; here are the {count} of this machine")
    if not _same_links(node, base):
        profile |= {"curves": None, "fits": None}
        remarks.append(f"curves and fits of {base.name} are left out: its links are not these")
    elif unused := [key for key in base.curves if key.ranks > count * key.nodes]:
        profile["curves"] = {str(key): None for key in unused}
    return profile, tuple(remarks)


def profile_text(profile: dict[str, Any], remarks: Sequence[str]) -> str:
    """The file's text: remarks as comments, then YAML."""
    body = yaml.safe_dump(profile, sort_keys=False, default_flow_style=None, width=110)
    return "".join(f"# {remark}\n" for remark in remarks) + body


def _leaf(value: Any, unit: str, origin: str) -> dict[str, Any]:
    return {"value": value, "unit": unit, "source": origin, "layer": "override", "trust": "high"}


def _nvlinks(topo: TopoMatrix) -> dict[tuple[int, int], int]:
    return {
        (first, second): relation
        for first, row in enumerate(topo.gpus)
        for second, relation in enumerate(row)
        if first < second and isinstance(relation, int)
    }


def _scale_up(links: dict[tuple[int, int], int], count: int, base: Cluster, origin: str) -> dict[str, Any]:
    """How GPUs are joined: each pair by all links of a GPU is a switch, by a part of them a mesh."""
    if not links:
        none = {"value": 0, "unit": "GB/s", "source": origin, "layer": "override", "trust": "high"}
        return {"scale_up": "pcie", "switch_reduction": False, "nvlink_bandwidth": none, "nvlink_pairs": None}
    architecture = base.device.architecture
    rate = NVLINK_BYTES_PER_S.get(architecture)
    if rate is None:
        raise ProfileError(
            f"{origin} has NVLinks, and {base.device.name} ({architecture}) has none; give the device that is built in"
        )
    all_pairs = len(links) == count * (count - 1) // 2 and len(set(links.values())) == 1
    widest = max(links.values())
    switched = all_pairs and (count - 1) * widest > MOST_NVLINKS[architecture]
    total = widest if switched else max(_links_of(links, gpu) for gpu in range(count))
    built: dict[str, Any] = {
        "scale_up": "nvswitch" if switched else "nvlink_mesh",
        "switch_reduction": switched and base.node.switch_reduction,
        "nvlink_bandwidth": _leaf(total * rate / 1e9, "GB/s", origin),
        "nvlink_pairs": None,
    }
    if not switched and not (all_pairs and count > 2):
        built["nvlink_pairs"] = _leaf([[*pair, number] for pair, number in links.items()], "links", origin)
    return built


def _links_of(links: dict[tuple[int, int], int], gpu: int) -> int:
    return sum(number for pair, number in links.items() if gpu in pair)


def _same_links(node: dict[str, Any], base: Cluster) -> bool:
    bandwidth = node["nvlink_bandwidth"]["value"] * 1e9
    same = abs(bandwidth - base.node.nvlink_bandwidth_bytes_per_s) < 1e-6 * bandwidth
    return bool(node["scale_up"] == base.node.scale_up == "nvswitch" and same)


def _pcie_groups(topo: TopoMatrix, base: Cluster, remarks: list[str]) -> list[list[int]]:
    """GPUs below one switch: PIX or PXB to each other or, where NVLink hides that, to one NIC."""
    count = len(topo.gpus)
    near = set(DISTANCES[:2])
    joined = [
        (first, second)
        for first in range(count)
        for second in range(first)
        if topo.gpus[first][second] in near
        or any({a, b} <= near for a, b in zip(topo.nic_distances[first], topo.nic_distances[second], strict=True))
    ]
    hidden = any(isinstance(relation, int) for row in topo.gpus for relation in row)
    seen = any(distance in near for row in topo.nic_distances for distance in row)
    if not hidden or seen:
        return _closure(count, joined)
    if count == base.node.num_devices:
        remarks.append(f"the matrix hides PCIe switches behind NVLink: pcie_groups are {base.name}'s")
        return [list(group) for group in base.node.pcie_groups]
    remarks.append("the matrix hides PCIe switches behind NVLink: each GPU is taken to have a root port of its own")
    return [[gpu] for gpu in range(count)]


def _numa_groups(topo: TopoMatrix, remarks: list[str]) -> list[list[int]]:
    count = len(topo.gpus)
    if topo.sockets:
        return [[g for g in range(count) if topo.sockets[g] == near] for near in dict.fromkeys(topo.sockets)]
    remarks.append("the matrix names no CPU or NUMA node: GPUs that are not SYS apart are put together")
    together = ((a, b) for a in range(count) for b in range(a) if topo.gpus[a][b] in DISTANCES[:4])
    if any(isinstance(relation, int) for row in topo.gpus for relation in row):
        return [list(range(count))]
    return _closure(count, together)


def _closure(count: int, joined: Iterable[tuple[int, int]]) -> list[list[int]]:
    group = list(range(count))
    for first, second in joined:
        old, new = group[first], group[second]
        group = [new if label == old else label for label in group]
    return [[g for g in range(count) if group[g] == label] for label in dict.fromkeys(group)]


def _nics(topo: TopoMatrix, origin: str, remarks: list[str]) -> dict[str, Any]:
    """NICs that some GPU has nearest, and whom they serve; the others are for storage and management."""
    if not topo.nics:
        remarks.append("the matrix has no NIC: num_nics and nic_bandwidth are the base's")
        return {}
    nearest = [_nearest(row) for row in topo.nic_distances]
    used = sorted({nic for nics in nearest for nic in nics})
    if left := [name for nic, name in enumerate(topo.nics) if nic not in used]:
        remarks.append(f"left out as no GPU's nearest: {', '.join(left)}")
    groups: list[list[int]] = []
    for nics in dict.fromkeys(map(tuple, nearest)):
        gpus = [gpu for gpu, own in enumerate(nearest) if tuple(own) == nics]
        # Libraries give each GPU a NIC of its own where as many lie at one distance.
        groups += [[gpu] for gpu in gpus] if len(nics) >= len(gpus) else [gpus]
    return {
        "num_nics": _leaf(len(used), "count", origin),
        "nic_groups": _leaf(groups, "devices", origin),
    }


def _nearest(distances: Sequence[str]) -> list[int]:
    best = min(map(DISTANCES.index, distances))
    return [nic for nic, distance in enumerate(distances) if DISTANCES.index(distance) == best]
