"""Operators: shapes and fixed names, no times; a graph of them says what must be computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeVar

from overlapsim.errors import WorkloadError
from overlapsim.units import dtype_bytes
from overlapsim.workload.routes import Route

CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_recv"]
COLLECTIVES: Final[tuple[CollectiveKind, ...]] = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "send_recv",
)
Engine = Literal["kernel", "nvls", "copy_engine"]
"""What moves the bytes: a collective kernel on SMs, one whose reduction is done by the switch, or copy engines."""
ENGINES: Final[tuple[Engine, ...]] = ("kernel", "nvls", "copy_engine")
REDUCING: Final = ("all_reduce", "reduce_scatter")
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
STEP_PREFIXES: Final = ("grad.", "param.", "pipe.")
"""Collectives of a whole step, told apart from those inside a layer: gradients summed over data-parallel ranks
(``grad.attn.qkv``), parameters gathered from their shards (``param.attn.qkv``), and activations or their gradients
between pipeline stages (``pipe.recv``, ``pipe.send``)."""
OPERATOR_PREFIXES: Final = ("moe.shared.", "optim.", *STEP_PREFIXES)
# A product of two sizes must stay far below 2^62; the largest published GEMM dimension is below 2^20.
MAX_DIMENSION: Final = 2**31 - 1
ADDED_BYTES: Final = 8.0
"""Bytes moved for an element that a GEMM adds to an fp32 matrix in memory: read and written."""


@dataclass(frozen=True)
class GemmOp:
    """``C[m, n] = A[m, k] B[k, n]`` on one rank.

    Attributes
    ----------
    name, pass_ : operator name (see ``OPERATOR_NAMES``) and pass
    m, n, k : sizes on this rank, elements
    dtype : of A, B and C
    accumulate : of the products, ``fp32`` or ``fp16``
    adds : C is added to an fp32 matrix in memory: a weight gradient of one of several micro-batches
    """

    m: int
    n: int
    k: int
    dtype: str = "bf16"
    accumulate: str = "fp32"
    name: str = "gemm"
    pass_: str = "fwd"
    adds: bool = False

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
    group : kind of ranks it joins (``tp``, ``ep``, ``dp`` ...), by which a layout places them on the machine;
        empty: consecutive ranks
    engine : what moves the bytes; whether a machine has it is for the cost layer to say
    sms : SMs (CTAs) that it is limited to; 0: as many as the library takes
    route : how routed tokens travel, where kernels of their own move them (all_to_all); None: the library's exchange.
        `size_bytes` stays what the library would move
    """

    kind: CollectiveKind
    size_bytes: float
    ranks: int
    dtype: str = "bf16"
    name: str = "gemm"
    pass_: str = "fwd"
    rank_rows: tuple[int, ...] = ()
    group: str = ""
    engine: Engine = "kernel"
    sms: int = 0
    route: Route | None = None

    def __post_init__(self) -> None:
        if self.kind not in COLLECTIVES:
            raise WorkloadError(f"collective {self.kind!r} is unknown; expected one of {', '.join(COLLECTIVES)}")
        if not self.size_bytes > 0:
            raise WorkloadError(f"collective size is {self.size_bytes} bytes; expected more than 0")
        if self.sms < 0:
            raise WorkloadError(f"a collective is limited to {self.sms} SMs; expected 0 (the library's number) or more")
        if self.ranks < 1:
            raise WorkloadError(f"a collective has {self.ranks} ranks; expected at least 1")
        if self.rank_rows and (len(self.rank_rows) != self.ranks or min(self.rank_rows) < 1):
            raise WorkloadError(
                f"rank_rows has {len(self.rank_rows)} entries, the least {min(self.rank_rows)}; "
                f"expected one count of at least 1 for each of {self.ranks} ranks"
            )
        if self.engine not in ENGINES:
            raise WorkloadError(f"engine {self.engine!r} is unknown; expected one of {', '.join(ENGINES)}")
        if self.engine == "copy_engine" and self.kind in REDUCING:
            raise WorkloadError(f"copy engines cannot reduce, so they cannot run {self.kind}; expected another engine")
        if self.route is not None and (self.kind != "all_to_all" or self.engine != "kernel"):
            raise WorkloadError(f"a route is given for {self.kind} by {self.engine}; expected an all_to_all by kernels")
        check_name(self.name, self.pass_)


class Work(Protocol):
    """What one kernel other than a plain GEMM computes: shapes that the cost layer prices by their type."""

    @property
    def flop(self) -> float:
        """Floating-point operations."""

    @property
    def hbm_bytes(self) -> float:
        """Bytes read and written, each access once."""


@dataclass(frozen=True)
class GroupedGemmOp:
    """``C_i[rows_i, n] = A_i[rows_i, k] B_i[k, n]`` for all i in one launch: the experts of one rank.

    Attributes
    ----------
    rows : of each product, 0 for an idle expert
    adds : products are added to fp32 matrices in memory (weight gradients of several micro-batches)
    looped : one kernel an expert, on several streams, instead of one for all: as many launches
    """

    rows: tuple[int, ...]
    n: int
    k: int
    dtype: str = "bf16"
    accumulate: str = "fp32"
    adds: bool = False
    looped: bool = False

    @property
    def flop(self) -> float:
        """Floating-point operations, a multiply-add counted as two; padding left out."""
        return 2.0 * sum(self.rows) * self.n * self.k

    @property
    def hbm_bytes(self) -> float:
        """Operands and results, the weights of idle experts left out."""
        active, element = sum(1 for count in self.rows if count), dtype_bytes(self.dtype)
        output = ADDED_BYTES if self.adds else element
        return float(sum(self.rows) * (self.n * output + self.k * element) + active * self.n * self.k * element)


@dataclass(frozen=True)
class TimedWork:
    """Work whose time is known: measured, or simulated before as a piece of its own.

    Attributes
    ----------
    duration_s : alone on all SMs, seconds
    flop, hbm_bytes : for bounds and for contention
    """

    duration_s: float
    flop: float = 0.0
    hbm_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.duration_s < float("inf"):
            raise WorkloadError(f"timed work takes {self.duration_s} s; expected a time above 0")


@dataclass(frozen=True)
class KernelOp:
    """A compute operator that is not one plain GEMM: attention, a norm, experts, or work of known time.

    Attributes
    ----------
    work : shapes (``AttentionOp``, ``MemoryOp``, ``GroupedGemmOp`` ...) or ``TimedWork``
    name, pass_ : fixed operator name and pass
    """

    work: Work
    name: str
    pass_: str = "fwd"

    def __post_init__(self) -> None:
        check_name(self.name, self.pass_)


Operator = GemmOp | CollectiveOp | KernelOp
SomeOperator = TypeVar("SomeOperator", GemmOp, CollectiveOp, KernelOp)
COMPUTE: Final = "compute"
"""Name of the stream on which operators run where nothing else is said."""


@dataclass(frozen=True)
class OperatorGraph:
    """Operators of one block in the order a host issues them, with their data dependencies and streams.

    Attributes
    ----------
    operators : the order is what a host issues and what operators of one stream run in
    dependencies : (producer, consumer) positions, rising
    streams : name of each operator's stream; empty puts all on ``compute``
    memory : bytes that each operator allocates at its start and frees at its end; empty where nobody counts
    """

    operators: tuple[Operator, ...]
    dependencies: tuple[tuple[int, int], ...] = ()
    streams: tuple[str, ...] = ()
    memory: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        count = len(self.operators)
        for src, dst in self.dependencies:
            if not 0 <= src < dst < count:
                raise WorkloadError(f"dependency ({src}, {dst}) does not rise within {count} operators")
        if self.streams and len(self.streams) != count:
            raise WorkloadError(f"{len(self.streams)} streams for {count} operators; expected one each, or none")
        if self.memory and len(self.memory) != count:
            raise WorkloadError(f"{len(self.memory)} memory amounts for {count} operators; expected one each, or none")

    def of_type(self, kind: type[SomeOperator]) -> Iterator[SomeOperator]:
        """Operators of one type, in order."""
        return (op for op in self.operators if isinstance(op, kind))

    def stream_of(self, position: int) -> str:
        """Name of the stream of one operator."""
        return self.streams[position] if self.streams else COMPUTE

    def producers(self, position: int) -> tuple[int, ...]:
        """Positions that an operator waits for."""
        return tuple(src for src, dst in self.dependencies if dst == position)

    def part(self, positions: Sequence[int]) -> OperatorGraph:
        """The operators at rising `positions` with the dependencies among them."""
        new = {old: number for number, old in enumerate(positions)}
        inner = tuple((new[a], new[b]) for a, b in self.dependencies if a in new and b in new)
        return OperatorGraph(
            tuple(self.operators[old] for old in positions),
            inner,
            tuple(self.streams[old] for old in positions) if self.streams else (),
            tuple(self.memory[old] for old in positions) if self.memory else (),
        )

    def reordered(self, order: Sequence[int]) -> OperatorGraph:
        """The same operators issued in another order: `order` lists the old positions.

        Raises
        ------
        WorkloadError
            If the order is not a permutation, or issues an operator before one that it depends on.
        """
        if sorted(order) != list(range(len(self.operators))):
            raise WorkloadError(f"an order of {len(order)} positions is no permutation of {len(self.operators)}")
        new = {old: number for number, old in enumerate(order)}
        moved = tuple(sorted((new[a], new[b]) for a, b in self.dependencies))
        return OperatorGraph(
            tuple(self.operators[old] for old in order),
            moved,
            tuple(self.streams[old] for old in order) if self.streams else (),
            tuple(self.memory[old] for old in order) if self.memory else (),
        )


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


def gemm_and_collective(
    gemm: GemmOp, kind: CollectiveKind, ranks: int, rank_rows: tuple[int, ...] = ()
) -> OperatorGraph:
    """The graph of a GEMM and the collective on its output, or of the ``all_gather`` of its rows and the GEMM.

    Parameters
    ----------
    gemm : sizes per rank; with ``all_gather`` m counts the gathered rows
    kind : ``all_gather`` (A is gathered from m / ranks rows a rank, then multiplied), ``all_reduce`` (the sum of C),
        ``reduce_scatter`` or ``all_to_all`` (C split over ranks)
    ranks : ranks in the group
    rank_rows : rows of C on each rank where routing is unbalanced; the largest is ``gemm.m``

    Returns
    -------
    OperatorGraph
        Two operators in the order they depend on each other; the collective is sized by C, the all_gather by A.

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
    if kind == "all_gather":
        gathered = gemm.m * gemm.k * dtype_bytes(gemm.dtype)
        return OperatorGraph((CollectiveOp(kind, gathered, ranks, gemm.dtype, gemm.name, gemm.pass_), gemm), ((0, 1),))
    rows = rank_rows if len(set(rank_rows)) > 1 else ()
    collective = CollectiveOp(kind, gemm.output_bytes, ranks, gemm.dtype, gemm.name, gemm.pass_, rows)
    return OperatorGraph((gemm, collective), ((0, 1),))


def independent_pair(gemm: GemmOp, kind: CollectiveKind, ranks: int, size_bytes: float) -> OperatorGraph:
    """The graph of a GEMM and a collective that need nothing from one another, such as a dgrad and a gather.

    Examples
    --------
    >>> independent_pair(GemmOp(64, 32, 16), "all_gather", 8, 4096.0).dependencies
    ()
    """
    return OperatorGraph((CollectiveOp(kind, size_bytes, ranks, gemm.dtype, gemm.name, gemm.pass_), gemm))
