"""Which numbers a profile has: key in the file, field of the dataclass, dimension and limits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

Dimension = Literal[
    "bandwidth", "bytes", "time", "flop_rate", "frequency", "count", "ratio", "tiles", "groups", "pairs"
]


@dataclass(frozen=True)
class Field:
    """One number of a profile.

    Attributes
    ----------
    key : name in the file
    attribute : name in the dataclass
    dimension : how it is read
    low, high : smallest and largest value, in SI units
    """

    key: str
    attribute: str
    dimension: Dimension
    low: float = 0.0
    high: float = math.inf


TINY: Final = 1e-30
"""Lower limit of what must be above zero."""

KERNEL_FIELDS: Final = (
    Field("gemm_tiles", "gemm_tiles", "tiles"),
    Field("gemm_efficiency", "gemm_efficiency", "ratio", TINY, 1.0),
    Field("gemm_launch", "gemm_launch_s", "time"),
    Field("template_slowdown", "template_slowdown", "ratio", 1.0),
    Field("hbm_efficiency", "hbm_efficiency", "ratio", TINY, 1.0),
    Field("signal_wait", "signal_wait_s", "time"),
)
DEVICE_FIELDS: Final = (
    Field("num_sms", "num_sms", "count", 1),
    Field("boost_clock", "boost_clock_hz", "frequency", TINY),
    Field("hbm_capacity", "hbm_bytes", "bytes", TINY),
    Field("hbm_bandwidth", "hbm_bandwidth_bytes_per_s", "bandwidth", TINY),
    Field("l2_capacity", "l2_bytes", "bytes", TINY),
    Field("smem_per_sm", "smem_per_sm_bytes", "bytes", TINY),
    Field("copy_engines", "copy_engines", "count"),
)
NODE_FIELDS: Final = (
    Field("num_devices", "num_devices", "count", 1),
    Field("nvlink_bandwidth", "nvlink_bandwidth_bytes_per_s", "bandwidth"),
    Field("nvlink_latency", "nvlink_latency_s", "time"),
    Field("pcie_bandwidth", "pcie_bandwidth_bytes_per_s", "bandwidth", TINY),
    Field("pcie_latency", "pcie_latency_s", "time"),
    Field("pcie_groups", "pcie_groups", "groups"),
    Field("numa_groups", "numa_groups", "groups"),
    Field("root_port_bandwidth", "root_port_bandwidth_bytes_per_s", "bandwidth", TINY),
    Field("numa_bandwidth", "numa_bandwidth_bytes_per_s", "bandwidth", TINY),
    Field("host_memory_bandwidth", "host_memory_bandwidth_bytes_per_s", "bandwidth", TINY),
    Field("num_nics", "num_nics", "count"),
    Field("nic_bandwidth", "nic_bandwidth_bytes_per_s", "bandwidth"),
)
COLLECTIVE_FIELDS: Final = (
    Field("base", "base_s", "time"),
    Field("hop", "hop_s", "time"),
    Field("wire_efficiency", "wire_efficiency", "ratio", TINY, 1.0),
    Field("sms", "sms", "count"),
)
PEAK_FIELD: Final = Field("peak_flop", "peak_flop_per_s", "flop_rate", TINY)
FABRIC_FIELDS: Final = (
    Field("net_latency", "net_latency_s", "time"),
    Field("nic_efficiency", "nic_efficiency", "ratio", TINY, 1.0),
    Field("nodes_per_leaf", "nodes_per_leaf", "count"),
    Field("spine_oversubscription", "spine_oversubscription", "ratio", 1.0),
)
TENSOR_SHARE_FIELD: Final = Field("tensor_share", "tensor_share", "ratio", TINY, 1.0)
NVLINK_PAIRS_FIELD: Final = Field("nvlink_pairs", "nvlink_pairs", "pairs")
NIC_GROUPS_FIELD: Final = Field("nic_groups", "nic_groups", "groups")
NUM_NODES_FIELD: Final = Field("num_nodes", "num_nodes", "count", 1)
NET_LATENCY_FIELD: Final = Field("net_latency", "net_latency_s", "time")
