"""Collects operators one by one into a graph; an operator needs the one before it unless something else is said."""

from __future__ import annotations

from collections.abc import Sequence

from overlapsim.workload.operators import (
    COMPUTE,
    CollectiveKind,
    CollectiveOp,
    GemmOp,
    KernelOp,
    Operator,
    OperatorGraph,
    Work,
)


class Recorder:
    """A graph under construction.

    Attributes
    ----------
    last : position of the operator that the next one needs; -1 before the first

    Examples
    --------
    >>> r = Recorder("fwd")
    >>> _ = r.gemm("mlp.fc1", 64, 32, 16), r.collective("reduce_scatter", "mlp.fc1", 4096.0, 8)
    >>> r.graph().dependencies
    ((0, 1),)
    """

    def __init__(self, pass_: str, dtype: str = "bf16") -> None:
        self.pass_, self.dtype = pass_, dtype
        self.last = -1
        self._also: list[int] = []
        self._operators: list[Operator] = []
        self._needs: list[tuple[int, int]] = []
        self._streams: list[str] = []

    def add(self, op: Operator, needs: Sequence[int] | None = None, stream: str = COMPUTE, *, main: bool = True) -> int:
        """Add an operator after those it `needs`; with `main` the next operator needs it."""
        number = len(self._operators)
        if needs is None:
            needs, self._also = [self.last, *self._also], []
        before = [position for position in needs if position >= 0]
        self._operators.append(op)
        self._streams.append(stream)
        self._needs += [(src, number) for src in dict.fromkeys(before)]
        if main:
            self.last = number
        return number

    def also(self, position: int) -> None:
        """Let the next operator need one more; nothing for -1."""
        self._also.append(position)

    def take(self) -> list[int]:
        """Positions that the next operator would have needed, which it now does not: a branch begins."""
        taken, self.last, self._also = [self.last, *self._also], -1, []
        return taken

    def gemm(
        self,
        name: str,
        m: int,
        n: int,
        k: int,
        *,
        pass_: str = "",
        needs: Sequence[int] | None = None,
        main: bool = True,
        dtype: str = "",
        adds: bool = False,
    ) -> int:
        """Add a GEMM of these sizes on one rank."""
        op = GemmOp(m, n, k, dtype or self.dtype, name=name, pass_=pass_ or self.pass_, adds=adds)
        return self.add(op, needs, main=main)

    def kernel(
        self, name: str, work: Work, *, pass_: str = "", needs: Sequence[int] | None = None, main: bool = True
    ) -> int:
        """Add any other kernel."""
        return self.add(KernelOp(work, name, pass_ or self.pass_), needs, main=main)

    def collective(
        self,
        kind: CollectiveKind,
        name: str,
        size_bytes: float,
        ranks: int,
        *,
        group: str = "",
        pass_: str = "",
        needs: Sequence[int] | None = None,
        stream: str = COMPUTE,
        main: bool = True,
        dtype: str = "",
    ) -> int:
        """Add a collective over more than one rank; over one there is nothing to add."""
        if ranks < 2:
            return self.last
        op = CollectiveOp(kind, size_bytes, ranks, dtype or self.dtype, name, pass_ or self.pass_, group=group)
        return self.add(op, needs, stream, main=main)

    def __len__(self) -> int:
        return len(self._operators)

    def graph(self) -> OperatorGraph:
        """Return the graph."""
        return OperatorGraph(tuple(self._operators), tuple(sorted(set(self._needs))), tuple(self._streams))
