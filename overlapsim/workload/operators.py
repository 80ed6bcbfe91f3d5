"""Operators: shapes and fixed names, no times; a graph of them says what must be computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from overlapsim.errors import WorkloadError
from overlapsim.units import dtype_bytes

CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_recv"]
COLLECTIVES: Final[tuple[CollectiveKind, ...]] = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "send_recv",
)
PASSES: Final = ("fwd", "dgrad", "wgrad", "recompute")
OPERATOR_NAMES: Final = frozenset(
    {
        *("attn.norm", "attn.qkv", "attn.rope", "attn.core", "attn.out"),
        *("mlp.norm", "mlp.fc1", "mlp.act", "mlp.fc2"),
        *("moe.router", "moe.dispatch", "moe.permute", "moe.fc1", "moe.act", "moe.fc2", "moe.unpermute", "moe.combine"),
        *("embed", "logits", "loss", "gemm"),
    }
)
"""Names on which plans, configs, records and reports join; ``gemm`` is a GEMM given without a model."""
OPERATOR_PREFIXES: Final = ("moe.shared.", "optim.", "grad.")
# A product of two sizes must stay far below 2^62; the largest published GEMM dimension is below 2^20.
MAX_DIMENSION: Final = 2**31 - 1


@dataclass(frozen=True)
class GemmOp:
    """``C[m, n] = A[m, k] B[k, n]`` on one rank.

    Attributes
    ----------
    name, pass_ : operator name (see ``OPERATOR_NAMES``) and pass
    m, n, k : sizes on this rank, elements
    dtype : of A, B and C
    accumulate : of the products, ``fp32`` or ``fp16``
    """

    m: int
    n: int
    k: int
    dtype: str = "bf16"
    accumulate: str = "fp32"
    name: str = "gemm"
    pass_: str = "fwd"

    def __post_init__(self) -> None:
        for dimension in ("m", "n", "k"):
            value = getattr(self, dimension)
            if not 1 <= value <= MAX_DIMENSION:
                raise WorkloadError(f"{dimension} is {value}; expected a size from 1 to {MAX_DIMENSION} elements")
        dtype_bytes(self.dtype)
        if self.accumulate not in ("fp16", "fp32"):
            raise WorkloadError(f"accumulate is {self.accumulate!r}; expected fp16 or fp32")
        check_name(self.name, self.pass_)

    @property
    def flop(self) -> float:
        """Floating-point operations, a multiply-add counted as two."""
        return 2.0 * self.m * self.n * self.k

    @property
    def output_bytes(self) -> int:
        """Bytes of C."""
        return self.m * self.n * dtype_bytes(self.dtype)

    @property
    def operand_bytes(self) -> int:
        """Bytes of A and B."""
        return (self.m + self.n) * self.k * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class CollectiveOp:
    """A collective over `ranks` ranks, sized as nccl-tests defines "size".

    Attributes
    ----------
    size_bytes : all_reduce: the buffer; all_gather, reduce_scatter, all_to_all: the larger side
        (all ranks' shards together)
    name, pass_ : of the operator it serves
    rank_rows : rows that each rank brings where routing is unbalanced (all_to_all); empty where all bring the same.
        `size_bytes` is then that of the rank with the most rows
    """

    kind: CollectiveKind
    size_bytes: float
    ranks: int
    dtype: str = "bf16"
    name: str = "gemm"
    pass_: str = "fwd"
    rank_rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in COLLECTIVES:
            raise WorkloadError(f"collective {self.kind!r} is unknown; expected one of {', '.join(COLLECTIVES)}")
        if not self.size_bytes > 0:
            raise WorkloadError(f"collective size is {self.size_bytes} bytes; expected more than 0")
        if self.ranks < 1:
            raise WorkloadError(f"a collective has {self.ranks} ranks; expected at least 1")
        if self.rank_rows and (len(self.rank_rows) != self.ranks or min(self.rank_rows) < 1):
            raise WorkloadError(
                f"rank_rows has {len(self.rank_rows)} entries, the least {min(self.rank_rows)}; "
                f"expected one count of at least 1 for each of {self.ranks} ranks"
            )
        check_name(self.name, self.pass_)


Operator = GemmOp | CollectiveOp
SomeOperator = TypeVar("SomeOperator", GemmOp, CollectiveOp)


@dataclass(frozen=True)
class OperatorGraph:
    """Operators of one block and their data dependencies, as (producer, consumer) positions."""

    operators: tuple[Operator, ...]
    dependencies: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        count = len(self.operators)
        for src, dst in self.dependencies:
            if not 0 <= src < dst < count:
                raise WorkloadError(f"dependency ({src}, {dst}) does not rise within {count} operators")

    def of_type(self, kind: type[SomeOperator]) -> Iterator[SomeOperator]:
        """Operators of one type, in order."""
        return (op for op in self.operators if isinstance(op, kind))


def check_name(name: str, pass_: str) -> None:
    """Refuse a name that plans and configs could not join on.

    Raises
    ------
    WorkloadError
        If the operator name or pass is not one of the fixed ones.
    """
    if name not in OPERATOR_NAMES and not name.startswith(OPERATOR_PREFIXES):
        raise WorkloadError(f"operator name {name!r} is unknown; expected one of {', '.join(sorted(OPERATOR_NAMES))}")
    if pass_ not in PASSES:
        raise WorkloadError(f"pass {pass_!r} is unknown; expected one of {', '.join(PASSES)}")


def gemm_then_collective(
    gemm: GemmOp, kind: CollectiveKind, ranks: int, rank_rows: tuple[int, ...] = ()
) -> OperatorGraph:
    """The graph of a GEMM whose output goes through a collective.

    Parameters
    ----------
    gemm : sizes per rank
    kind : ``all_reduce`` (the sum of C), ``reduce_scatter`` or ``all_to_all`` (C split over ranks)
    ranks : ranks in the group
    rank_rows : rows of C on each rank where routing is unbalanced; the largest is ``gemm.m``

    Returns
    -------
    OperatorGraph
        Two operators, the second sized by C.

    Raises
    ------
    WorkloadError
        If `rank_rows` does not fit the ranks, the GEMM, or a collective that needs equal shares.
    """
    if rank_rows and len(rank_rows) != ranks:
        raise WorkloadError(f"rank_rows has {len(rank_rows)} entries for {ranks} ranks; expected one count for each")
    if rank_rows and (kind != "all_to_all" or max(rank_rows) != gemm.m):
        raise WorkloadError(
            f"rank_rows with {kind} and a largest of {max(rank_rows)}; expected all_to_all and a largest of {gemm.m}"
        )
    rows = rank_rows if len(set(rank_rows)) > 1 else ()
    collective = CollectiveOp(kind, gemm.output_bytes, ranks, gemm.dtype, gemm.name, gemm.pass_, rows)
    return OperatorGraph((gemm, collective), ((0, 1),))
