"""What no schedule and no strategy can beat in a layout: FLOP over peak, state in HBM, bytes on the wire."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from overlapsim.hardware.bounds import wire_lower_bound_s
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import graph_builder
from overlapsim.step.traffic import precision_of, stage_traffic
from overlapsim.workload.attention import AttentionOp
from overlapsim.workload.build import Which
from overlapsim.workload.operators import CollectiveOp, GemmOp, GroupedGemmOp, Operator
from overlapsim.workload.rank_map import GROUP_KINDS, RankMap
from overlapsim.workload.stage_weights import stage_parameters

PASSES: Final[tuple[Which, ...]] = ("forward", "backward")


def step_operators(inputs: StepInputs) -> Iterator[tuple[Operator, float]]:
    """Operators of a step with how often a GPU runs each, on average over the stages of the pipeline.

    Layers, embedding and logits of all micro-batches, forward and backward, and data-parallel traffic; not the
    optimizer, and not transfers between stages.
    """
    builder, layout, model = graph_builder(inputs), inputs.layout, inputs.model
    share = inputs.num_micro_batches / layout.pp
    for which in PASSES:
        for layer, count in model.kinds.items():
            yield from ((op, count * share) for op in builder.layer(layer, which).operators)
        yield from ((op, share) for op in builder.embedding(which).operators)
        yield from ((op, share) for op in builder.head(which).operators)
    for device in range(layout.pp):
        traffic = stage_traffic(inputs, device)
        yield from ((op, 1 / layout.pp) for op, _ in (*traffic.reduce, *traffic.gather))


def step_lower_bound_s(inputs: StepInputs) -> float:
    """Seconds that the hardware forbids a step in this layout to go below.

    The largest of: FLOP of GEMMs, attention and experts at the dense peak;
    every parameter's state read and written once by the optimizer at the
    sheet's HBM rate; and, for each kind of group, the bytes of its
    collectives over the narrowest links they cross.
    All are means over the stages of a pipeline, which its slowest stage
    cannot go below.

    Returns
    -------
    float
        Seconds, > 0.
    """
    device = inputs.cluster.device
    ranks = RankMap(inputs.layout, inputs.rank_order)
    compute_s = 0.0
    wire_s: dict[str, float] = defaultdict(float)
    for op, times in step_operators(inputs):
        if isinstance(op, CollectiveOp) and op.route is not None:
            # A token that several experts of a node take crosses to it once: fewer bytes than the exchange has.
            continue
        if isinstance(op, CollectiveOp):
            placed = ranks.group(op.group) if op.group in GROUP_KINDS else op.ranks
            wire_s[op.group] += times * wire_lower_bound_s(inputs.cluster, placed, op.kind, op.size_bytes)
        elif isinstance(op, GemmOp):
            compute_s += times * op.flop / device.peak(op.dtype, op.accumulate)
        elif isinstance(op.work, GroupedGemmOp):
            compute_s += times * op.work.flop / device.peak(op.work.dtype, op.work.accumulate)
        elif isinstance(op.work, AttentionOp):
            compute_s += times * op.work.flop / device.peak(op.work.dtype)
    return max(compute_s, _state_bytes(inputs) / device.hbm_bandwidth_bytes_per_s, *wire_s.values(), 0.0)


def _state_bytes(inputs: StepInputs) -> float:
    """Bytes of parameters and their state that a GPU must move in a step, on average over the stages."""
    layout, width = inputs.layout, precision_of(inputs)
    total = 0.0
    for device in range(layout.pp):
        local = stage_parameters(inputs.model, layout, device, inputs.job.stage_layers)
        own = local.dense / layout.dense_shards + local.expert / layout.expert_shards
        # The optimizer reads and writes its state, reads gradients and writes parameters.
        total += own * (2 * width.optimizer_bytes + width.gradient_bytes + width.parameter_bytes)
    return total / layout.pp
