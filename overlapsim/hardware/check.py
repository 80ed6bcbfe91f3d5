"""Consistency of a profile: what contradicts itself, and what is missing or weakly known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from overlapsim.hardware.bounds import wire_lower_bound_s
from overlapsim.hardware.profile import Cluster, DeviceSpec, Sources
from overlapsim.units import format_bandwidth, format_bytes, format_time

# Dense bf16 FLOP per clock and SM: the vendor's peak over SMs and boost clock (hwprofiles/SOURCES.md, A H W4).
FLOP_PER_CLOCK_SM: Final[Mapping[str, float]] = {"ampere": 2048, "hopper": 4096, "ada": 512, "blackwell": 8192}
# Rate over bf16's by dtype and accumulate type. Ada doubles with fp16 accumulate on consumer boards, and its
# workstation boards run at that rate throughout.
_RATE: Final[Mapping[str, float]] = {"tf32": 0.5, "fp16": 1, "bf16": 1, "fp8": 2, "int8": 2}
_DOUBLED: Final = frozenset({"ada"})
# Boards clock a little apart from the sheet; a sparsity figure is twice too high.
PEAK_SLACK: Final = 1.25
# Dense bf16 FLOP per byte of HBM: 37 on an H20, 295 on an H100. Outside, a rate has a wrong prefix or factor.
BALANCE: Final = (15.0, 800.0)
# Repeats of one case differ by a few percent.
CURVE_SLACK: Final = 0.97
MAIN_COLLECTIVES: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def check_cluster(cluster: Cluster) -> list[str]:
    """All findings about a cluster's profile, contradictions first; empty if there is nothing to say.

    Examples
    --------
    >>> from overlapsim.hardware.loading import load_cluster
    >>> check_cluster(load_cluster("h800-sxm8"))[0]
    'no measured curve of all_reduce: priced by latency and wire bytes, which ranges mark as prior'
    """
    return [*contradictions(cluster), *gaps(cluster)]


def contradictions(cluster: Cluster) -> list[str]:
    """Numbers that cannot all be right: sparsity peaks, wrong prefixes, curves faster than the links."""
    return [*_device(cluster.device), *_links(cluster), *_curves(cluster)]


def gaps(cluster: Cluster) -> list[str]:
    """What was not measured, and what that disables."""
    found = []
    for collective in MAIN_COLLECTIVES:
        ranks = sorted(key.ranks for key in cluster.curves if key.collective == collective and key.nodes == 1)
        if not ranks:
            found.append(
                f"no measured curve of {collective}: priced by latency and wire bytes, which ranges mark as prior"
            )
        elif missing := [n for n in (2, 4, 8) if n <= cluster.node.num_devices and n not in ranks]:
            counts = ", ".join(map(str, missing))
            found.append(f"no measured curve of {collective} at {counts} ranks: priced by latency and wire bytes")
    parts = (("", cluster.sources), ("node.", cluster.node.sources), ("device.", cluster.device.sources))
    weak = sorted(prefix + name for prefix, sources in parts for name in _weak(sources))
    if weak:
        found.append(f"{len(weak)} numbers of low trust, measure or replace them: {', '.join(weak)}")
    return found


def _weak(sources: Sources) -> list[str]:
    return [name for name, source in sources.items() if source.trust == "low"]


def _device(device: DeviceSpec) -> Iterator[str]:
    per_clock = FLOP_PER_CLOCK_SM.get(device.architecture)
    if per_clock is None:
        yield f"architecture {device.architecture!r} is not known: peaks of {device.name} are not checked for sparsity"
    else:
        for key, rate in device.peak_flop_per_s.items():
            dtype, _, accumulate = key.partition(":")
            if dtype not in _RATE:
                continue
            doubled = 2 if accumulate == "fp16" and device.architecture in _DOUBLED else 1
            dense = device.num_sms * device.boost_clock_hz * per_clock * _RATE[dtype] * doubled
            if rate > PEAK_SLACK * dense:
                yield (
                    f"peak_flop.{key} of {device.name} is {rate / 1e12:.4g} TFLOP/s, {rate / dense:.2f} times "
                    f"SMs x clock x dense rate ({dense / 1e12:.4g}): looks like the figure with sparsity"
                )
    balance = max(device.peak_flop_per_s.get(dtype, 0.0) for dtype in ("bf16", "fp16"))
    balance /= device.hbm_bandwidth_bytes_per_s
    if balance and not BALANCE[0] <= balance <= BALANCE[1]:
        yield (
            f"{device.name} has {balance:.3g} FLOP per HBM byte; expected {BALANCE[0]:g} to {BALANCE[1]:g}: "
            "check the units of peak_flop and hbm_bandwidth"
        )


def _links(cluster: Cluster) -> Iterator[str]:
    node = cluster.node
    hbm = node.device.hbm_bandwidth_bytes_per_s
    inner = max(node.nvlink_bandwidth_bytes_per_s, node.pcie_bandwidth_bytes_per_s)
    for name, rate in (
        ("nvlink_bandwidth", node.nvlink_bandwidth_bytes_per_s),
        ("pcie_bandwidth", node.pcie_bandwidth_bytes_per_s),
    ):
        if rate > hbm:
            yield f"{name} of {format_bandwidth(rate)} is above HBM's {format_bandwidth(hbm)}: check its unit"
    if node.nvlink_bandwidth_bytes_per_s and node.nvlink_bandwidth_bytes_per_s < node.pcie_bandwidth_bytes_per_s:
        yield "nvlink_bandwidth is below pcie_bandwidth: check its unit"
    if node.nic_bandwidth_bytes_per_s > inner:
        yield f"nic_bandwidth of {format_bandwidth(node.nic_bandwidth_bytes_per_s)} a NIC is above a GPU's own link"


def _curves(cluster: Cluster) -> Iterator[str]:
    for key, table in cluster.curves.items():
        name = f"curve {key.collective}/{key.ranks}/{key.nodes}"
        if key.nodes > key.ranks or key.ranks > key.nodes * cluster.node.num_devices:
            yield f"{name} has more ranks than {key.nodes} nodes of {cluster.node.num_devices} GPUs: it is never used"
            continue
        if key.ranks % key.nodes:
            yield f"{name} does not spread its ranks evenly over nodes: not checked against the links"
            continue
        wide = cluster.with_nodes(max(cluster.num_nodes, key.nodes))
        per_node = key.ranks // key.nodes
        devices = [n * cluster.node.num_devices + local for n in range(key.nodes) for local in range(per_node)]
        for size, time in zip(table.size_bytes, table.time_s, strict=True):
            bound = wire_lower_bound_s(wide, devices, key.collective, size)
            if time < CURVE_SLACK * bound:
                yield (
                    f"{name}: {format_bytes(size)} in {format_time(time)} is faster than its links allow "
                    f"({format_time(bound)}): check the units of the table or the links"
                )
                break
