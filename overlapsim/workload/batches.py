"""An operator as those of parts of its batch: fewer rows, and for gradients of weights less depth."""

from __future__ import annotations

from dataclasses import replace

from overlapsim.workload.attention import AttentionOp, FusedAttention, UnfusedAttention
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.operators import CollectiveOp, GemmOp, GroupedGemmOp, KernelOp, Operator, Work

WHOLE: frozenset[str] = frozenset({"grad_accumulate"})
"""Kernels over weights: each part of a batch runs them whole."""


def in_batches(op: Operator, batches: int) -> tuple[Operator, ...] | None:
    """An operator over each of so many parts of its batch; None where it cannot be cut.

    Rows are shared out evenly, the first parts having one more where they do
    not divide. Attention is cut between sequences, so that of one cannot be
    cut; nor can work of which only the time is known. Experts keep all their
    weights in each part, and a weight gradient its size.

    Examples
    --------
    >>> [op.m for op in in_batches(GemmOp(65, 32, 16), 2)], in_batches(GemmOp(1, 32, 16), 2)
    ([33, 32], None)
    """
    if isinstance(op, GemmOp):
        if op.pass_ == "wgrad":
            depths = _shares(op.k, batches)
            return None if depths is None else tuple(replace(op, k=depth) for depth in depths)
        rows = _shares(op.m, batches)
        return None if rows is None else tuple(replace(op, m=count) for count in rows)
    if isinstance(op, CollectiveOp):
        ranks = tuple(tuple(max(1, round(count / batches)) for count in op.rank_rows) for _ in range(batches))
        return tuple(replace(op, size_bytes=op.size_bytes / batches, rank_rows=rows) for rows in ranks)
    works = _works(op, batches)
    return None if works is None else tuple(replace(op, work=work) for work in works)


def _works(op: KernelOp, batches: int) -> tuple[Work, ...] | None:
    work = op.work
    if isinstance(work, GroupedGemmOp):
        if op.pass_ == "wgrad":
            depths = _shares(work.k, batches)
            return None if depths is None else tuple(replace(work, k=depth) for depth in depths)
        parts = [_dealt(count, batches, number) for number, count in enumerate(work.rows)]
        rows = tuple(zip(*parts, strict=True))
        return tuple(replace(work, rows=own) for own in rows) if all(map(any, rows)) else None
    if isinstance(work, MemoryOp):
        if work.kind in WHOLE:
            return (work,) * batches
        counts = _shares(work.rows, batches)
        return None if counts is None else tuple(replace(work, rows=count) for count in counts)
    if isinstance(work, AttentionOp):
        return _attention(work, batches)
    if isinstance(work, UnfusedAttention):
        inner = _attention(work.op, batches)
        return None if inner is None else tuple(replace(work, op=part) for part in inner)
    if isinstance(work, FusedAttention):
        found = [_attention(part, batches) for part in work.ops]
        if any(parts is None for parts in found):
            return None
        return tuple(replace(work, ops=parts) for parts in zip(*(p for p in found if p is not None), strict=True))
    return None


def _attention(op: AttentionOp, batches: int) -> tuple[AttentionOp, ...] | None:
    counts = _shares(op.batch, batches)
    return None if counts is None else tuple(replace(op, batch=count) for count in counts)


def _shares(count: int, batches: int) -> tuple[int, ...] | None:
    return None if count < batches else _dealt(count, batches, 0)


def _dealt(count: int, batches: int, first: int) -> tuple[int, ...]:
    """Parts of a count; the ones left over go to the parts from `first` on, so that experts of odd rows take turns."""
    each, over = divmod(count, batches)
    return tuple(each + ((part - first) % batches < over) for part in range(batches))
