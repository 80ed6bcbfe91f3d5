"""Devices and clusters with the constants that the anchors of these tests were published for."""

from __future__ import annotations

from overlapsim.hardware.profile import (
    Cluster,
    CollectiveSpec,
    DeviceSpec,
    KernelSpec,
    NodeSpec,
    Source,
)

TILES = ((128, 256, 64), (256, 128, 64), (128, 128, 64), (64, 128, 64), (128, 64, 64), (64, 64, 64))
FITTED = {"kernels.gemm_efficiency": Source("derived", "bf16 GEMM table, a quarter of the points", "medium")}
A100 = DeviceSpec(
    "A100-SXM4-80",
    "ampere",
    num_sms=108,
    boost_clock_hz=1.41e9,
    peak_flop_per_s={"fp16": 312e12, "bf16": 312e12, "tf32": 156e12},
    hbm_bytes=80e9,
    hbm_bandwidth_bytes_per_s=2.039e12,
    l2_bytes=40e6,
    smem_per_sm_bytes=164e3,
    copy_engines=3,
    kernels=KernelSpec(TILES, 0.873, 2.6e-6, 1.15, 0.794, 2e-6),
    sources=FITTED,
)
H100 = DeviceSpec(
    "H100-SXM5",
    "hopper",
    num_sms=132,
    boost_clock_hz=1.83e9,
    peak_flop_per_s={"fp16": 989.4e12, "bf16": 989.4e12, "fp8": 1978.9e12},
    hbm_bytes=80e9,
    hbm_bandwidth_bytes_per_s=3.35e12,
    l2_bytes=50e6,
    smem_per_sm_bytes=228e3,
    copy_engines=3,
    kernels=KernelSpec(TILES, 0.924, 1.9e-6, 1.15, 0.865, 2e-6),
    sources=FITTED,
)


def nvlink_cluster(
    device: DeviceSpec = A100, *, nvlink: float = 300e9, nodes: int = 4, **collectives: float
) -> Cluster:
    """Nodes of eight GPUs behind a switch, eight NICs of 25 GB/s."""
    node = NodeSpec(
        "switch8",
        device,
        num_devices=8,
        scale_up="nvswitch",
        nvlink_bandwidth_bytes_per_s=nvlink,
        nvlink_latency_s=1e-6,
        pcie_bandwidth_bytes_per_s=26e9,
        pcie_latency_s=2e-6,
        pcie_groups=((0, 1), (2, 3), (4, 5), (6, 7)),
        numa_groups=((0, 1, 2, 3), (4, 5, 6, 7)),
        root_port_bandwidth_bytes_per_s=26e9,
        numa_bandwidth_bytes_per_s=50e9,
        p2p=True,
        host_memory_bandwidth_bytes_per_s=100e9,
        num_nics=8,
        nic_bandwidth_bytes_per_s=25e9,
    )
    spec = {"base_s": 8e-6, "hop_s": 1e-6, "wire_efficiency": 0.75, **collectives}
    return Cluster(
        "switch8-pod",
        node,
        nodes,
        net_latency_s=10e-6,
        collectives=CollectiveSpec(spec["base_s"], spec["hop_s"], spec["wire_efficiency"], sms=16),
    )
