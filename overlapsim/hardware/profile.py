"""What a machine is: frozen specs of devices, nodes, fabrics and clusters, each number with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from overlapsim.errors import ProfileError

Layer = Literal["datasheet", "derived", "measured", "prior", "override"]
Trust = Literal["high", "medium", "low"]
ScaleUp = Literal["nvswitch", "nvlink_mesh", "pcie"]


@dataclass(frozen=True)
class Source:
    """Where a number comes from.

    Attributes
    ----------
    layer : datasheet, derived (computed from published numbers), measured,
        prior (a stated judgement), or override (given by the user)
    reference : a code of ``hwprofiles/SOURCES.md`` or a file name
    trust : high, medium or low
    """

    layer: Layer
    reference: str
    trust: Trust = "high"


Sources = Mapping[str, Source]


@dataclass(frozen=True)
class Fit:
    """Fitted constants of one cost model on one device or cluster.

    Attributes
    ----------
    family, key : which model (``gemm``, ``attention``, ``memory``, ``collective`` ...) and which of its cases
    parameters : values in SI units by name; what they mean is the model's to say
    source : what it was fitted on; a sister's fit taken over is ``derived``
    num_points : measured points it was fitted on
    spread : by regime, the central 90 % of measured over predicted time on points not fitted; empty if there are none
    notes : split, residuals and whatever else a reader must know
    """

    family: str
    key: str
    parameters: Mapping[str, float]
    source: Source
    num_points: int
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    notes: str = ""


Fits = Mapping[str, Fit]
"""Fits by ``family.key``, such as ``gemm.bf16`` or ``collective.nccl``."""


@dataclass(frozen=True)
class KernelSpec:
    """What one GPU's kernels cost beyond their arithmetic.

    Attributes
    ----------
    gemm_tiles : output tiles (BM, BN, BK) that the vendor library and templates offer
    gemm_efficiency : share of the dense peak that a large GEMM's main loop reaches
    gemm_launch_s : floor of any kernel, seconds
    template_slowdown : time of a templated (fused or signalled) GEMM over the vendor library's, >= 1
    hbm_efficiency : share of the sheet's HBM bandwidth that kernels reach
    signal_wait_s : from the last tile of a wave group to the start of its collective: poll plus launch, seconds
    """

    gemm_tiles: tuple[tuple[int, int, int], ...]
    gemm_efficiency: float
    gemm_launch_s: float
    template_slowdown: float
    hbm_efficiency: float
    signal_wait_s: float


@dataclass(frozen=True)
class DeviceSpec:
    """One GPU.  Peaks are dense; sparsity peaks are refused by ``profiles check``.

    Attributes
    ----------
    peak_flop_per_s : by dtype (``fp16 bf16 tf32 fp8 ...``) with fp32 accumulate; a key such as
        ``fp16:fp16`` holds the rate with another accumulate type where the device has one
    hbm_bytes, l2_bytes, smem_per_sm_bytes : capacities
    hbm_bandwidth_bytes_per_s : the sheet's figure, both directions together
    copy_engines : DMA engines usable beside kernels
    tensor_share : share of its architecture's tensor rate per SM, accumulating in fp32, that this part has: export
        and consumer parts are cut (0.25 on an H20, 0.5 on GeForce)
    fits : fitted constants of cost models of this device, by ``family.key``
    sources : source of each field, by field name (``peak_flop_per_s.bf16``, ``kernels.gemm_efficiency`` ...)
    """

    name: str
    architecture: str
    num_sms: int
    boost_clock_hz: float
    peak_flop_per_s: Mapping[str, float]
    hbm_bytes: float
    hbm_bandwidth_bytes_per_s: float
    l2_bytes: float
    smem_per_sm_bytes: float
    copy_engines: int
    kernels: KernelSpec
    tensor_share: float = 1.0
    fits: Fits = field(default_factory=dict, compare=False)
    sources: Sources = field(default_factory=dict, compare=False)

    def peak(self, dtype: str, accumulate: str = "fp32") -> float:
        """Dense peak in FLOP/s of `dtype` operands accumulated in `accumulate`.

        Raises
        ------
        ProfileError
            If the device has no such rate.
        """
        rate = self.peak_flop_per_s.get(f"{dtype}:{accumulate}", self.peak_flop_per_s.get(dtype))
        if rate is None:
            raise ProfileError(
                f"device {self.name} has no {dtype} rate; it has {', '.join(sorted(self.peak_flop_per_s))}"
            )
        return rate


@dataclass(frozen=True)
class NodeSpec:
    """One machine: GPUs, the links between them, PCIe and NICs.

    Attributes
    ----------
    num_devices : GPUs below one operating system, or of one rack where NVLink spans its trays (NVL72): ``--nodes``
        counts these
    scale_up : nvswitch (any pair at full rate), nvlink_mesh (direct links, xGMI included), or pcie (no NVLink)
    nvlink_bandwidth_bytes_per_s : per GPU and direction, all its links together; 0 without NVLink
    nvlink_latency_s : one hop
    pcie_bandwidth_bytes_per_s : per GPU and direction, as a large copy reaches it
    pcie_latency_s : one hop
    pcie_groups : GPUs below one shared root port or switch uplink, e.g. ((0, 1, 2, 3), (4, 5, 6, 7))
    numa_groups : GPUs below one CPU socket
    root_port_bandwidth_bytes_per_s : per direction, shared by a PCIe group
    numa_bandwidth_bytes_per_s : per direction, shared between sockets
    p2p : GPUs read each other over PCIe; False stages through host memory (two PCIe hops and host memory)
    host_memory_bandwidth_bytes_per_s : shared by all staged traffic of one socket
    num_nics, nic_bandwidth_bytes_per_s : NICs of the node, each per direction
    switch_reduction : the NVSwitch reduces in the network (NVLS), so an all-reduce may beat the ring's wire bytes
    nvlink_pairs : direct links of an NVLink mesh, (GPU, GPU, links); empty for one share between every two GPUs
    nic_groups : GPUs that each NIC link serves, in the order of the NICs; empty if GPUs are dealt to NICs in order
    """

    name: str
    device: DeviceSpec
    num_devices: int
    scale_up: ScaleUp
    nvlink_bandwidth_bytes_per_s: float
    nvlink_latency_s: float
    pcie_bandwidth_bytes_per_s: float
    pcie_latency_s: float
    pcie_groups: tuple[tuple[int, ...], ...]
    numa_groups: tuple[tuple[int, ...], ...]
    root_port_bandwidth_bytes_per_s: float
    numa_bandwidth_bytes_per_s: float
    p2p: bool
    host_memory_bandwidth_bytes_per_s: float
    num_nics: int
    nic_bandwidth_bytes_per_s: float
    switch_reduction: bool = False
    nvlink_pairs: tuple[tuple[int, int, int], ...] = ()
    nic_groups: tuple[tuple[int, ...], ...] = ()
    sources: Sources = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class FabricSpec:
    """The network between nodes.

    Attributes
    ----------
    technology : infiniband, roce, efa, tcpx, tcpxo, slingshot ...
    net_latency_s : inter-node hop of a small message
    nic_efficiency : share of a NIC's rate that large messages reach
    rail_optimised : the i-th NICs of all nodes share leaf switches (a rail), so libraries keep traffic on its rail
    nodes_per_leaf : nodes below one leaf switch (of each rail); 0 takes the network as one switch
    spine_oversubscription : NIC rate below a leaf over the rate of its uplinks, >= 1
    """

    name: str
    technology: str
    net_latency_s: float
    nic_efficiency: float
    rail_optimised: bool
    nodes_per_leaf: int
    spine_oversubscription: float
    sources: Sources = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class CollectiveSpec:
    """Fallback cost of a library collective where no curve was measured: ``alpha + steps * hop + wire / rate``.

    Attributes
    ----------
    base_s : launch and synchronisation of one collective, seconds
    hop_s : one ring step, seconds
    wire_efficiency : share of a link's rate that the library moves
    sms : SMs (CTAs) a collective holds
    """

    base_s: float
    hop_s: float
    wire_efficiency: float
    sms: int


@dataclass(frozen=True)
class CurveKey:
    """Which measured curve: collective, ranks and how many nodes they span."""

    collective: str
    ranks: int
    nodes: int = 1

    def __str__(self) -> str:
        """As profiles spell it: ``all_reduce/8``, ``all_reduce/16/2``."""
        return f"{self.collective}/{self.ranks}" + (f"/{self.nodes}" if self.nodes > 1 else "")


@dataclass(frozen=True)
class CurveTable:
    """A measured size -> time table as read; interpolation lives in ``cost/collective.py``.

    Attributes
    ----------
    size_bytes, time_s : rising sizes (nccl-tests "size") and times, equal lengths >= 1
    source : origin of the table
    digest : SHA-256 of the text it was read from, empty if it was not read from one
    """

    size_bytes: tuple[float, ...]
    time_s: tuple[float, ...]
    source: Source
    digest: str = ""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes on one fabric, with what was measured on them.

    Attributes
    ----------
    num_nodes : nodes in use
    net_latency_s : inter-node hop of a small message: the fabric's, unless the cluster gives its own
    fabric : the network between nodes; None if nothing but its latency is known
    curves : measured collectives
    fits : fitted constants of cost models of the whole machine (collectives), by ``family.key``
    dropped : inherited curves and fits, the device's too, that were measured on another machine and left out: a
        sentence for each group
    calibrated : True once `calibrate` wrote measured parameters into the profile
    digest : SHA-256 of the files the cluster was loaded from (provenance of plans)
    """

    name: str
    node: NodeSpec
    num_nodes: int
    net_latency_s: float
    collectives: CollectiveSpec
    fabric: FabricSpec | None = None
    curves: Mapping[CurveKey, CurveTable] = field(default_factory=dict)
    calibrated: bool = False
    digest: str = ""
    fits: Fits = field(default_factory=dict, compare=False)
    dropped: tuple[str, ...] = field(default=(), compare=False)
    sources: Sources = field(default_factory=dict, compare=False)

    @property
    def device(self) -> DeviceSpec:
        """The GPU all nodes have."""
        return self.node.device

    @property
    def num_devices(self) -> int:
        """GPUs in the cluster."""
        return self.num_nodes * self.node.num_devices

    def with_nodes(self, num_nodes: int) -> Cluster:
        """The same cluster with another number of nodes.

        Raises
        ------
        ProfileError
            If `num_nodes` is less than 1.
        """
        if num_nodes < 1:
            raise ProfileError(f"--nodes is {num_nodes}; expected at least 1")
        return replace(self, num_nodes=num_nodes)

    def with_curve(self, key: CurveKey, table: CurveTable) -> Cluster:
        """The same cluster with one curve added or replaced (a user's own measurement)."""
        return replace(self, curves={**self.curves, key: table})
