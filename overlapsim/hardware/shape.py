"""Whether a node's parts fit together: groups that cover its devices, links that are there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlapsim.hardware.reader import Reader


def check_node(reader: Reader, numbers: Mapping[str, Any], scale_up: str | None) -> None:
    """Note what in a node's `numbers` contradicts itself; a number that could not be read is passed over."""
    count = numbers.get("num_devices")
    for key in ("pcie_groups", "numa_groups", "nic_groups"):
        groups = numbers.get(key)
        if count is not None and groups and sorted(d for group in groups for d in group) != [*range(count)]:
            reader.problem(f"{key} is {groups}; expected each device 0..{count - 1} exactly once")
    nvlink = numbers.get("nvlink_bandwidth_bytes_per_s")
    if scale_up in ("nvswitch", "nvlink_mesh") and nvlink == 0:
        reader.problem(f"nvlink_bandwidth is 0; expected more with scale_up {scale_up}")
    if scale_up == "pcie" and nvlink:
        reader.problem("nvlink_bandwidth is not 0; expected 0 with scale_up pcie")
    pairs = numbers.get("nvlink_pairs", ())
    if pairs and scale_up != "nvlink_mesh":
        reader.problem(f"nvlink_pairs is given with scale_up {scale_up}; expected scale_up nvlink_mesh")
    if count is not None and any(max(pair[:2]) >= count for pair in pairs):
        reader.problem(f"nvlink_pairs is {pairs}; expected devices 0..{count - 1}")
    if numbers.get("num_nics") and numbers.get("nic_bandwidth_bytes_per_s") == 0:
        reader.problem(f"nic_bandwidth is 0; expected more with {numbers['num_nics']} NICs")
    if len(numbers.get("nic_groups", ())) > numbers.get("num_nics", 0):
        reader.problem(f"nic_groups has {len(numbers['nic_groups'])} groups; expected at most num_nics")
