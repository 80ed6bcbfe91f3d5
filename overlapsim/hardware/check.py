"""Consistency of a profile: what contradicts itself, and what is missing or weakly known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from overlapsim.hardware.bounds import wire_lower_bound_s
from overlapsim.hardware.profile import Cluster, CurveKey, CurveTable, DeviceSpec, Fit, Sources
from overlapsim.units import format_bandwidth, format_bytes, format_time

# Dense FLOP per clock and SM in bf16 (fp16 where there is no bf16) of each architecture: the vendor's peak over SMs
# and boost clock (hwprofiles/SOURCES.md, PEAK-SHARE); parts that are cut have a `tensor_share`.
FLOP_PER_CLOCK_SM: Final[Mapping[str, float]] = {
    "volta": 1024,
    "ampere": 2048,
    "ada": 1024,
    "hopper": 4096,
    "blackwell": 8192,
    "blackwell_ultra": 8192,
    "blackwell_gb202": 1024,
    "cdna2": 1024,
    "cdna3": 2048,
    "cdna4": 4096,
    "tpu_v5": 131072,
    "cpu": 64,
}
# Rate over bf16's by dtype. What does not accumulate in fp32 is not cut on consumer parts.
_RATE: Final[Mapping[str, float]] = {"fp32": 0.5, "tf32": 0.5, "fp16": 1, "bf16": 1, "fp8": 2, "int8": 2, "fp4": 4}
_ULTRA_FP4: Final = 6.7
# Boards clock a little apart from the sheet; a sparsity figure is twice too high.
PEAK_SLACK: Final = 1.25
# Dense bf16 FLOP per byte of HBM: 37 on an H20, 295 on an H100. Outside, a rate has a wrong prefix or factor.
BALANCE: Final = (15.0, 800.0)
# A copy over PCIe reaches less than the wire: a 100 Gb/s NIC belongs in an x16 port of generation 3 (12 GB/s).
NIC_SLACK: Final = 1.1
# Repeats of one case differ by a few percent.
CURVE_SLACK: Final = 0.97
# One kernel and one fit serve both 16-bit types.
GEMM_TWINS: Final = (("bf16", "fp16"), ("fp8",))
FALLBACKS: Final[Mapping[str, str]] = {
    "gemm": "priced by tiles and waves with the profile's efficiencies; no residual layer",
    "attention": "priced by a roofline with prior efficiencies",
    "memory": "norms, activations and copies are priced by hbm_efficiency and a prior launch floor",
    "collective": "rank counts and algorithms without a curve are priced by base, hop and wire bytes of a ring",
    "overlap": "what a kernel and a collective cost each other is a prior of another machine",
}
"""What is done without a fit of a family."""
OPERATOR_FAMILIES: Final = ("gemm", "collective", "overlap", "launch", "contention")
"""Families that plans of one GEMM and its collective are priced by; the others price the rest of a model."""
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
    return [*_device(cluster.device), *_links(cluster), *impossible_curves(cluster), *_odd_curves(cluster)]


def impossible_curves(cluster: Cluster) -> list[str]:
    """Measured curves that beat what the links allow by more than repeats differ: no prediction can hold both."""
    found = []
    for key, table in cluster.curves.items():
        if why_unused(key, cluster) is None:
            found += [f"curve {key}: {told}" for told in [_impossible(key, table, cluster)] if told]
    return found


def gaps(cluster: Cluster) -> list[str]:
    """What was not measured or was measured on another machine, and what that disables."""
    found = list(cluster.dropped)
    for collective in MAIN_COLLECTIVES:
        ranks = sorted(key.ranks for key in cluster.curves if key.collective == collective and key.nodes == 1)
        if not ranks:
            found.append(
                f"no measured curve of {collective}: priced by latency and wire bytes, which ranges mark as prior"
            )
        elif missing := [n for n in (2, 4, 8) if n <= cluster.node.num_devices and n not in ranks]:
            counts = ", ".join(map(str, missing))
            found.append(f"no measured curve of {collective} at {counts} ranks: priced by latency and wire bytes")
    if cluster.node.num_nics and not any(key.nodes > 1 for key in cluster.curves):
        found.append("no measured curve across nodes: priced by hop and wire bytes, which ranges mark as prior")
    found += _missing_fits(cluster)
    fabric = cluster.fabric.sources if cluster.fabric else {}
    parts = (
        ("", cluster.sources),
        ("fabric.", fabric),
        ("node.", cluster.node.sources),
        ("device.", cluster.device.sources),
    )
    weak = sorted(prefix + name for prefix, sources in parts for name in _weak(sources))
    if weak:
        found.append(f"{len(weak)} numbers of low trust, measure or replace them: {', '.join(weak)}")
    return found


def _missing_fits(cluster: Cluster) -> Iterator[str]:
    """What each family of cost models falls back to without constants fitted on this machine."""
    fits, device = {**cluster.device.fits, **cluster.fits}, cluster.device
    fitted = {dtype for twins in GEMM_TWINS if any(f"gemm.{twin}" in fits for twin in twins) for dtype in twins}
    known = (dtype for twins in GEMM_TWINS for dtype in twins)
    unfitted = [dtype for dtype in known if dtype in device.peak_flop_per_s and dtype not in fitted]
    if unfitted:
        yield f"no gemm fit of {', '.join(unfitted)}: {FALLBACKS['gemm']}"
    families = {name.partition(".")[0] for name in fits}
    for family, fallback in FALLBACKS.items():
        if family != "gemm" and family not in families:
            yield f"no {family} fit: {fallback}"
    believed = sorted(name for name, fit in fits.items() if _is_believed(fit))
    for asked, use in ((True, ""), (False, " for models that `operator` does not use")):
        names = [name for name in believed if (name.partition(".")[0] in OPERATOR_FAMILIES) is asked]
        if names:
            yield f"{len(names)} fits taken over from a sister or judged{use}, ranges are wider: {', '.join(names)}"


def _is_believed(fit: Fit) -> bool:
    """Whether a fit is not this machine's own: published figures of it may be derived, and then are of high trust."""
    if fit.source.layer in ("measured", "override"):
        return False
    return fit.source.layer == "prior" or fit.source.trust != "high" or fit.num_points == 0


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
            share = 1.0 if accumulate == "fp16" or dtype == "fp4" else device.tensor_share
            ratio = _ULTRA_FP4 if (dtype, device.architecture) == ("fp4", "blackwell_ultra") else _RATE[dtype]
            dense = device.num_sms * device.boost_clock_hz * per_clock * ratio * share
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
    if node.nic_bandwidth_bytes_per_s > NIC_SLACK * inner:
        yield f"nic_bandwidth of {format_bandwidth(node.nic_bandwidth_bytes_per_s)} a NIC is above a GPU's own link"


def why_unused(key: CurveKey, cluster: Cluster) -> str | None:
    """Why a curve is not compared with the links: its ranks have no place on such nodes."""
    if key.nodes > key.ranks or key.ranks > key.nodes * cluster.node.num_devices:
        return f"has more ranks than {key.nodes} nodes of {cluster.node.num_devices} GPUs: it is never used"
    if key.ranks % key.nodes:
        return "does not spread its ranks evenly over nodes: not checked against the links"
    if key.nodes > 1 and not cluster.node.num_nics:
        return "spans nodes that have no NIC: it is never used"
    return None


def _odd_curves(cluster: Cluster) -> Iterator[str]:
    for key in cluster.curves:
        if reason := why_unused(key, cluster):
            yield f"curve {key} {reason}"


def _impossible(key: CurveKey, table: CurveTable, cluster: Cluster) -> str | None:
    wide = cluster.with_nodes(max(cluster.num_nodes, key.nodes))
    per_node = key.ranks // key.nodes
    devices = [n * cluster.node.num_devices + local for n in range(key.nodes) for local in range(per_node)]
    bounds = (wire_lower_bound_s(wide, devices, key.collective, size) for size in table.size_bytes)
    for size, time, bound in zip(table.size_bytes, table.time_s, bounds, strict=True):
        if time < CURVE_SLACK * bound:
            return (
                f"{format_bytes(size)} in {format_time(time)} is faster than its links allow ({format_time(bound)}): "
                "check the units of the table (bytes, seconds) and of the links (GB/s are eight times Gb/s), or take "
                f"the curve away (curves: {{{key}: null}}) until it is measured again"
            )
    return None
