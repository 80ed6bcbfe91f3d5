"""Data parallelism: gradients merged into buckets and reduced beside the rest of the backward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from msgspec import Meta

from overlapsim.plan import Finding
from overlapsim.strategy.arrange import Slot, alike, assemble, collectives, consumers, merged, slots_of
from overlapsim.strategy.base import YES, Applicability, Context, Parameters, ParameterSpace, StrategyInfo
from overlapsim.strategy.compose import ArrangingStrategy
from overlapsim.workload.operators import COMPUTE, CollectiveOp, OperatorGraph

STREAM: Final = "dp"
"""Gradients and parameters of one data-parallel group share a communicator, hence a stream."""
REDUCING: Final = ("all_reduce", "reduce_scatter")
# From the default of PyTorch's DDP (25 MiB) to the buckets of large runs (128 Mi elements in fp32).
SIZES: Final = tuple(25 * 2.0**20 * 4**i for i in range(4))


@dataclass(frozen=True)
class GradBucketsParameters:
    """Bytes at which a bucket is full, and whether buckets run beside compute or after all of it."""

    bucket_bytes: Annotated[float, Meta(gt=0)]
    overlap: bool


class GradBuckets(ArrangingStrategy):
    """A bucket is sent when its last gradient is computed; parameters are gathered a bucket ahead of the forward.

    With ``all_reduce`` this is plain data parallelism.  With ``reduce_scatter``
    and ``param.* fwd`` gathers it is a distributed optimizer (ZeRO-1 and 2):
    the gathers that follow one step's optimizer run under the next forward.
    """

    name = "grad_buckets"
    parameter_type = GradBucketsParameters
    traits = frozenset({"data_parallel"})
    needs = ("data_parallel",)
    excludes = frozenset({"sharded_parameters"})
    info = StrategyInfo(
        summary="gradients reduced in buckets as they become ready; with a distributed optimizer, parameters gathered "
        "in buckets under the next forward",
        granularity="bucket",
        hides="gradient collectives under the backward, parameter gathers under the forward",
        cost="SMs of the collective, a latency per bucket; the last bucket (first layers) is exposed",
        frameworks=(
            "Megatron-LM (overlap-grad-reduce, overlap-param-gather, ddp-bucket-size)",
            "PyTorch DDP (bucket_cap_mb)",
            "DeepSpeed (reduce_bucket_size)",
        ),
        references=("Li et al., VLDB'20 (PyTorch DDP)", "Rajbhandari et al., SC'20 (ZeRO)"),
    )

    def applies_to(self, context: Context) -> Applicability:
        """Refuse a graph without gradients to sum over ranks."""
        if collectives(context.graph, "grad.", REDUCING):
            return YES
        reason = "no gradient is summed over ranks: the graph has no all_reduce or reduce_scatter named grad.*"
        return Applicability(False, (reason,))

    def parameters(self, context: Context) -> ParameterSpace:
        """Leave open the size of a bucket."""
        whole = float(_gradient_bytes(context.graph))
        sizes = tuple(size for size in SIZES if size < whole)
        return ParameterSpace(
            {"bucket_bytes": (*sizes, whole), "overlap": (True,)},
            screen=lambda point: exposed_tail_s(context, point["bucket_bytes"]),
        )

    def degenerate(self, context: Context) -> Parameters:
        """One bucket after all compute."""
        return {"bucket_bytes": float(_gradient_bytes(context.graph)), "overlap": False}

    def arrange(self, context: Context, parameters: Parameters) -> OperatorGraph:
        """Merge gradients in the order they are computed in, and parameters in the order they are used in."""
        graph, size, overlap = context.graph, parameters["bucket_bytes"], parameters["overlap"]
        grads = list(buckets(graph, collectives(graph, "grad.", REDUCING), size))
        params = list(buckets(graph, _gathers(graph), size))
        taken = {i for bucket in (*grads, *params) for i in bucket}
        slots = [slot for i, slot in enumerate(slots_of(graph)) if i not in taken]
        stream = STREAM if overlap else COMPUTE
        after = _end_of_compute(graph, grads)
        for bucket in grads:
            slots.append(merged(graph, bucket, "grad.bucket", bucket[-1] if overlap else after, stream))
        slots += _ahead(graph, params, stream)
        return assemble(graph, slots)

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return the buckets as they come out."""
        graph = context.graph
        first = graph.operators[collectives(graph, "grad.", REDUCING)[0]]
        assert isinstance(first, CollectiveOp)
        grads = list(buckets(graph, collectives(graph, "grad.", REDUCING), parameters["bucket_bytes"]))
        return {
            "gradient_collective": first.kind,
            "ranks": first.ranks,
            "gradient_dtype": first.dtype,
            "bucket_bytes": parameters["bucket_bytes"],
            "num_buckets": len(grads),
            "overlap_gradients": parameters["overlap"],
            "overlap_parameters": parameters["overlap"] and bool(_gathers(graph)),
        }

    def findings(self, context: Context, parameters: Parameters) -> tuple[Finding, ...]:
        """Say how the tail is cut."""
        grads = list(buckets(context.graph, collectives(context.graph, "grad.", REDUCING), parameters["bucket_bytes"]))
        if len(grads) > 1 or not parameters["overlap"]:
            return ()
        message = "one bucket holds all gradients: it starts when the last is computed, and nothing hides it"
        return (Finding("one_bucket", message),)


def buckets(graph: OperatorGraph, positions: Sequence[int], bucket_bytes: float) -> Iterator[list[int]]:
    """Cut collectives into runs that are full once they hold `bucket_bytes`; unlike ones are never in one bucket."""
    for group in alike(graph, positions):
        bucket: list[int] = []
        held = 0.0
        for i in group:
            bucket.append(i)
            held += _bytes(graph, i)
            if held >= bucket_bytes:
                yield bucket
                bucket, held = [], 0.0
        if bucket:
            yield bucket


def exposed_tail_s(context: Context, bucket_bytes: float) -> float:
    """Time of the gradient buckets that is left when the last operator is computed, if compute is not slowed.

    A bucket starts when its last gradient is there and the one before is sent:
    ``end[j] = max(end[j-1], ready[j]) + t[j]``; the tail is ``end[-1]`` less the time of compute.
    """
    graph, prices = context.graph, context.prices
    grads = collectives(graph, "grad.", REDUCING)
    aside = {*grads, *_gathers(graph)}
    computed = [0.0 if i in aside else prices.operator_s(op) for i, op in enumerate(graph.operators)]
    done = list(itertools.accumulate(computed))
    end_s = 0.0
    for bucket in sorted(buckets(graph, grads, bucket_bytes), key=lambda bucket: bucket[-1]):
        whole = merged(graph, bucket, "grad.bucket", 0.0, STREAM).operator
        end_s = max(end_s, done[bucket[-1]]) + prices.operator_s(whole)
    return max(0.0, end_s - done[-1])


def _ahead(graph: OperatorGraph, params: Sequence[Sequence[int]], stream: str) -> Iterator[Slot]:
    """Gathers, each issued before the first use of the bucket before it; the first one where it always was."""
    used = consumers(graph)
    for number, bucket in enumerate(params):
        at = float(bucket[0])
        if number and stream != COMPUTE:
            before = params[number - 1]
            at = min((p for i in before for p in used.get(i, ())), default=before[-1]) - 0.5
        needed = max((p for i in bucket for p in graph.producers(i)), default=-1)
        yield merged(graph, bucket, "param.bucket", max(at, needed + 0.25), stream)


def _gathers(graph: OperatorGraph) -> list[int]:
    return collectives(graph, "param.", ("all_gather",), ("fwd",))


def _end_of_compute(graph: OperatorGraph, grads: Sequence[Sequence[int]]) -> float:
    """Just before the first operator that uses a summed gradient, or behind everything."""
    used = consumers(graph)
    return min((p for bucket in grads for i in bucket for p in used.get(i, ())), default=len(graph.operators)) - 0.5


def _bytes(graph: OperatorGraph, position: int) -> float:
    op = graph.operators[position]
    assert isinstance(op, CollectiveOp)
    return op.size_bytes


def _gradient_bytes(graph: OperatorGraph) -> float:
    return sum(_bytes(graph, i) for i in collectives(graph, "grad.", REDUCING))


STRATEGY = GradBuckets()
