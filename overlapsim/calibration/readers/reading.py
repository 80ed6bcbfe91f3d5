"""What every reader takes and gives, and what several of them need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from overlapsim.calibration.records import NO_HEADER, Header, Record
from overlapsim.errors import CalibrationError
from overlapsim.plan import Finding
from overlapsim.units import DTYPE_BYTES


@dataclass(frozen=True)
class Hints:
    """What the user says because a file does not.

    Attributes
    ----------
    ranks_per_node : ranks on each node where the measurement was made; None for files that say their nodes
    collective, ranks, dtype : of tables that lack the column
    """

    ranks_per_node: int | None = None
    collective: str | None = None
    ranks: int | None = None
    dtype: str | None = None

    def nodes(self, ranks: int, name: str) -> int:
        """Nodes of `ranks` ranks.

        Raises
        ------
        CalibrationError
            If ranks per node were not said, or the ranks do not fill their nodes.
        """
        if self.ranks_per_node is None:
            raise CalibrationError(
                f"{name}: the file does not say how its {ranks} ranks lie on nodes, and overlapsim does not guess; "
                "give --ranks-per-node (all ranks on one node: their number)"
            )
        if ranks <= self.ranks_per_node:
            return 1
        if ranks % self.ranks_per_node:
            raise CalibrationError(
                f"{name}: {ranks} ranks do not fill nodes of {self.ranks_per_node}; check --ranks-per-node"
            )
        return ranks // self.ranks_per_node


NO_HINTS: Final = Hints()


@dataclass(frozen=True)
class Reading:
    """What one file holds.

    Attributes
    ----------
    format : ``nccl-tests text``, ``nccl-tests json``, ``csv``, ``kineto`` or ``records``
    records, header : the facts and where they were taken
    findings : what was left out, assumed or odd
    """

    format: str
    records: tuple[Record, ...]
    header: Header = NO_HEADER
    findings: tuple[Finding, ...] = ()


# Spellings of benchmark tools and of torch's process groups.
_COLLECTIVES: Final[Mapping[str, str]] = {
    "allreduce": "all_reduce",
    "allreducecoalesced": "all_reduce",
    "allgather": "all_gather",
    "allgatherbase": "all_gather",
    "allgathersingle": "all_gather",
    "allgatherintotensor": "all_gather",
    "allgatherintotensorcoalesced": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "reducescattersingle": "reduce_scatter",
    "reducescattertensor": "reduce_scatter",
    "reducescattertensorcoalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoallbase": "all_to_all",
    "alltoallsingle": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send_recv",
}
_DTYPES: Final[Mapping[str, str]] = {
    **{name: name for name in DTYPE_BYTES},
    "float": "fp32",
    "float32": "fp32",
    "double": "fp64",
    "float64": "fp64",
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "bfloat": "bf16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8e4m3": "fp8",
    "float8e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "f8e4m3": "fp8",
    "f8e5m2": "fp8",
    "char": "int8",
    "byte": "int8",
    "uint8": "int8",
    "nvfp4": "fp4",
}
# Wider integers move as other words of their size do.
_BYTES: Final[Mapping[str, int]] = {
    **DTYPE_BYTES,
    **{"int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "int": 4, "long": 8, "bool": 1},
}


def collective_of(name: str) -> str | None:
    """Name used in overlapsim of a tool's collective, None for one that is not modelled.

    Examples
    --------
    >>> collective_of("_allgather_base"), collective_of("all_to_allv"), collective_of("alltoall_perf")
    ('all_gather', None, 'all_to_all')
    """
    plain = name.lower().removesuffix("_perf").removesuffix("_perf_mpi").replace("_", "").replace("-", "")
    return _COLLECTIVES.get(plain)


def dtype_of(name: str) -> str:
    """Name used in overlapsim of a tool's element type; unknown ones stay as they are.

    Examples
    --------
    >>> dtype_of("half"), dtype_of("BFloat16"), dtype_of("int32")
    ('fp16', 'bf16', 'int32')
    """
    plain = name.strip().lower().removeprefix("torch.").removeprefix("nccl").removeprefix("c10::")
    return _DTYPES.get(plain, plain)


def element_bytes(dtype: str) -> int | None:
    """Bytes of one element, None where the type is unknown."""
    return _BYTES.get(dtype)


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests prints them."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in ("all_gather", "reduce_scatter", "all_to_all") else 1.0
