"""NCCL's tuner table for a plan's groups, and the environment that loads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from overlapsim.cost.overlap import overlap_spec
from overlapsim.cost.tuner import TunerMachine, library_choice
from overlapsim.emit.base import Emitted, Emitter, Subject, comment
from overlapsim.emit.rules import Version
from overlapsim.errors import PlanError
from overlapsim.hardware.levels import levels
from overlapsim.hardware.profile import Cluster
from overlapsim.plan import Finding
from overlapsim.workload.placement import placements
from overlapsim.workload.rank_map import GroupKind, RankMap

TABLE: Final = "nccl_tuner.csv"
ENVIRONMENT: Final = "nccl.env"
COLLECTIVES: Final[Mapping[str, str]] = {
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_reduce": "allreduce",
}
"""What the tuner is asked for, as its table spells it; send, receive and all-to-all it is not asked for."""
MOST_BYTES: Final = 2**50
"""End of the last range: no message is larger, and the plugin reads 64 bits."""
KEEP: Final = 0
"""Channels that leave the count to NCCL; -1 or an empty field would make it 1."""
ANY: Final = -1
_STEPS: Final = 4  # looked at for each doubling of the size
_LOW_LATENCY: Final = "ll"
_FAMILIES: Final = ("volta", "turing", "ampere", "ada", "hopper", "blackwell", "blackwell_ultra")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes
    ----------
    collective : by its neutral name
    low_bytes, high_bytes : sizes that it is for, both ends in it (what NCCL gathers or scatters, whole)
    algorithm, protocol : forced; where NCCL does not offer them, the next row that fits counts
    channels : CTAs, one an SM; `KEEP` leaves the count to NCCL
    nodes, ranks : of the communicator; `ANY` for all
    """

    collective: str
    low_bytes: int
    high_bytes: int
    algorithm: str
    protocol: str
    channels: int
    nodes: int = ANY
    ranks: int = ANY

    def __str__(self) -> str:
        """Return the line; the last two fields are any number of pipelined operations, any registration."""
        head = f"{COLLECTIVES[self.collective]},{self.low_bytes},{self.high_bytes}"
        return f"{head},{self.algorithm},{self.protocol},{self.channels},{self.nodes},{self.ranks},{ANY},{ANY}"


class Nccl(Emitter):
    """NCCL's tuner table, from plans of training steps."""

    name = "nccl"
    framework = "nccl"

    def write(self, subject: Subject, version: Version) -> Emitted:
        """Return table and environment.

        Every collective and size has a row for every communicator: first
        those of the plan's groups, then those of any other, with NCCL's own
        number of channels.

        Raises
        ------
        PlanError
            If the cluster is not given, or its GPUs do not run NCCL.
        """
        cluster = subject.cluster
        if cluster is None:
            raise PlanError("the tuner table follows the cluster, and none is given; expected the plan's: --cluster")
        if cluster.device.architecture not in _FAMILIES:
            raise PlanError(
                f"{cluster.device.name} does not run NCCL ({cluster.device.architecture}); expected a plan for GPUs of "
                "NVIDIA"
            )
        head = self.header(subject, version)
        rows = [row for group in groups_of(subject, cluster) for row in group_rows(subject, cluster, *group)]
        titles = "collective,min_bytes,max_bytes,algorithm,protocol,channels,nodes,ranks,pipelined,registered"
        table = comment((*head, titles)) + "".join(f"{row}\n" for row in (*rows, *other_rows()))
        return Emitted(
            {TABLE: table, ENVIRONMENT: _environment(head)}, tuple(_left(subject)), tuple(_findings(subject))
        )


def groups_of(subject: Subject, cluster: Cluster) -> tuple[tuple[int, int], ...]:
    """Nodes and ranks of the plan's communicators that reduce, gather or scatter, each pair once."""
    order = RankMap(subject.layout, subject.settings.rank_order)
    placed = placements(order, levels(cluster.with_nodes(subject.settings.nodes)), cluster.node.num_devices)
    kinds: tuple[GroupKind, ...] = (
        "tp",
        "cp",
        "dp",
        "dp_cp",
        "shard",
        "replica",
        "etp",
        "edp",
        "expert_shard",
        "expert_replica",
        "embedding",
    )
    found = (placed[kind] for kind in kinds)
    return tuple(dict.fromkeys((group.nodes, group.size) for group in found if group.size > 1))


def group_rows(subject: Subject, cluster: Cluster, nodes: int, ranks: int) -> Iterator[Row]:
    """Rows of one size of communicator: what NCCL's own model picks, with the SMs that the plan counts on.

    Messages in the low-latency protocol keep NCCL's count, which grows with their size.
    """
    node = cluster.node
    machine = TunerMachine(
        cluster.device.architecture,
        "pci" if node.scale_up == "pcie" else "nvlink",
        node.nvlink_bandwidth_bytes_per_s or node.pcie_bandwidth_bytes_per_s,
        node.num_nics * node.nic_bandwidth_bytes_per_s,
        ranks,
        nodes if ranks % nodes == 0 else 1,
        switch_reduction=node.switch_reduction,
    )
    asked = asked_sms(subject)
    for collective in COLLECTIVES:
        channels = asked.get((collective, ranks), overlap_spec(cluster).comm_sms)
        for low, high, (algorithm, protocol) in _ranges(machine, collective):
            count = KEEP if protocol == _LOW_LATENCY else max(1, channels)
            yield Row(collective, low, high, algorithm, protocol, count, nodes, ranks)


def asked_sms(subject: Subject) -> Mapping[tuple[str, int], int]:
    """SMs of collectives that strategies run on fewer or more than the library takes, by collective and ranks."""
    found: dict[tuple[str, int], int] = {}
    for op in subject.entry.operators:
        sms = op.settings.get("comm_sms", 0)
        if op.settings.get("comm_engine", "kernel") == "kernel" and isinstance(sms, int) and sms > 0:
            key = (str(op.settings["collective"]), int(op.settings["ranks"]))
            found[key] = max(sms, found.get(key, 0))
    return found


def other_rows() -> Iterator[Row]:
    """Rings, always there, for communicators that the plan does not have and where NCCL does not offer an algorithm.

    Without these rows the plugin would leave such collectives one channel.
    """
    for collective in COLLECTIVES:
        yield Row(collective, 0, _RING_LL, "ring", "ll", KEEP)
        yield Row(collective, _RING_LL + 1, MOST_BYTES, "ring", "simple", KEEP)


_RING_LL: Final = 2**16


def _ranges(machine: TunerMachine, collective: str) -> Iterator[tuple[int, int, tuple[str, str]]]:
    """Ranges of sizes with one choice, from 0 to `MOST_BYTES`, each end found to the byte."""

    def pick(sizes: Sequence[int]) -> list[tuple[str, str]]:
        pairs, index = library_choice(machine, collective, sizes)
        return [pairs[i] for i in index]

    grid = sorted({0, *(round(2 ** (step / _STEPS)) for step in range(_STEPS * 40 + 1)), MOST_BYTES})
    choices = pick(grid)
    low = 0
    for at in range(1, len(grid)):
        if choices[at] == choices[at - 1]:
            continue
        inside, outside = grid[at - 1], grid[at]
        while outside - inside > 1:
            middle = (inside + outside) // 2
            inside, outside = (middle, outside) if pick([middle])[0] == choices[at - 1] else (inside, middle)
        yield low, inside, choices[at - 1]
        low = outside
    yield low, MOST_BYTES, choices[-1]


def _environment(head: tuple[str, ...]) -> str:
    return comment(head) + (
        "# The plugin is the example tuner of NCCL's sources (plugins/tuner/example), built with make.\n"
        "export NCCL_TUNER_PLUGIN=libnccl-tuner-example.so\n"
        f"export NCCL_TUNER_CONFIG_FILE=$PWD/{TABLE}\n"
        "unset NCCL_ALGO NCCL_PROTO\n"
    )


def _left(subject: Subject) -> Iterator[str]:
    """What the table cannot say."""
    layout = subject.layout
    if layout.pp > 1 or layout.ep > 1 or layout.cp > 1 or layout.sp > 1:
        yield "NCCL does not ask its tuner for send, receive and all-to-all: their channels stay NCCL's"
    yield "the table tells communicators apart by nodes and ranks alone: groups of one size share their rows"
    engines = sorted({op.strategy for op in subject.entry.operators if not op.settings.get("comm_sms")} - {"serial"})
    if engines:
        yield f"what {', '.join(engines)} move does not pass through NCCL's collectives"


def _findings(subject: Subject) -> Iterator[Finding]:
    yield Finding(
        "algorithms_by_published_model",
        "algorithms and protocols are those that NCCL's published cost model picks; time a size on each side of a "
        "border with nccl-tests before it matters",
    )


EMITTER = Nccl()
