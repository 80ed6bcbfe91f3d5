"""A lower bound of the engine's step time for every candidate of a space, in arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from overlapsim.planner.layer_times import LayerTimes
from overlapsim.planner.space import OVERLAPS, RECOMPUTES, SCHEDULE_NAMES, Space
from overlapsim.step.inputs import DP_OVERLAPS, StepInputs
from overlapsim.step.traffic import boundary_bytes, stage_traffic
from overlapsim.workload.build import GraphBuilder
from overlapsim.workload.layout import Layout
from overlapsim.workload.operators import CollectiveOp

Float = npt.NDArray[np.float64]
# GEMMs cut in pieces may be a little cheaper together than whole: models are not monotone (cost.prices.PIECES).
PIECES_LOW: Final = 0.94
# Times are whole picoseconds, per unit of a block.
ROUNDING: Final = 1 - 1e-6
_PAIRED: Final = ("dualpipe", "dualpipev", "interleaved_pairs")


def step_bounds(space: Space, times: LayerTimes, inputs: StepInputs) -> Float:
    """Seconds below which no candidate's simulated step can be.

    Per device: its blocks of all micro-batches, the fill before its first
    and the drain behind its last; then what of data parallelism nothing can
    hide, and the optimizer.

    Parameters
    ----------
    space, times : candidates, and prices of their layers
    inputs : any step of the request

    Returns
    -------
    array of shape (candidates,)
    """
    c = space.columns
    layers, pp, vpp = float(space.model.num_layers), c["pp"].astype(float), c["vpp"].astype(float)
    micro = space.global_batch / (c["dp"].astype(float) * c["micro_batch"])
    forward, dgrad, wgrad = _layer_means(space, times)
    head, embed = _ends(space, times)
    # Uneven stages: the last one holds no more than its share, and what is before it the rest.
    last = np.floor(layers / pp)
    load = micro * (last * (forward + dgrad + wgrad) + head)
    load = np.maximum(load, micro * (layers / pp) * (forward + dgrad + wgrad))
    chunk = np.floor(layers / (pp * vpp))
    before = np.where(vpp > 1, (pp - 1) * chunk, layers - last)
    transfer = _transfers(space, times)
    schedule = c["schedule"]
    fill = before * forward + (pp - 1) * transfer + np.where(pp > 1, embed, 0.0)
    drain = before * (dgrad + wgrad) + (pp - 1) * transfer
    split = _is(schedule, ("zb_h1", "zb_h2"))
    two_way = _is(schedule, ("zbv", "dualpipe", "dualpipev"))
    # A split backward hands on input gradients alone, and weight gradients fill what is left of the drain.
    drain = np.where(split, np.maximum(0.0, before * dgrad - micro * last * wgrad), drain)
    fill, drain = np.where(two_way, 0.0, fill), np.where(two_way, 0.0, drain)
    single = np.where(pp == 1, micro * embed, 0.0)
    return (fill + load + drain + single + _after(space, times, inputs)) * ROUNDING


def _is(schedule: npt.NDArray[np.int32], names: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    return np.isin(schedule, [SCHEDULE_NAMES.index(name) for name in names])


def _layer_means(space: Space, times: LayerTimes) -> tuple[Float, Float, Float]:
    """Mean seconds of a layer's forward, input-gradient and weight-gradient pass, recompute with the second."""
    c, kinds = space.columns, space.model.kinds
    free = (c["overlap"] == OVERLAPS.index("strategies")) | _is(c["schedule"], _PAIRED)
    sums = {name: np.zeros(len(space)) for name in ("forward", "dgrad", "wgrad", "selective", "sar")}
    for layer, count in kinds.items():
        columns = times.columns(space, layer)
        share = count / space.model.num_layers
        for name in sums:
            field = name if f"{name} library" in columns else f"rebuilt_{name}"
            library, overlapped = columns[f"{field} library"], columns[f"{field} overlapped"]
            sums[name] += share * np.where(free, overlapped * PIECES_LOW, library)
    rebuilt = np.select(
        [c["recompute"] == RECOMPUTES.index(name) for name in ("full", "selective", "sar")],
        [sums["forward"], sums["selective"], sums["sar"]],
        0.0,
    )
    return sums["forward"], sums["dgrad"] + rebuilt, sums["wgrad"]


def _ends(space: Space, times: LayerTimes) -> tuple[Float, Float]:
    """Logits and loss, forward and backward; and the embedding's forward."""
    first, inverse = space.distinct(("tp", "sp", "cp", "sequence_parallel", "micro_batch"))
    head, embed = np.empty(len(first)), np.empty(len(first))
    for number, row in enumerate(first.tolist()):
        job, prices = space.job(row), times.prices(space, row)
        builder = GraphBuilder(space.model, space.layout(row), times.inputs.recipe, job.micro_batch, job.seq_len)
        graphs = (builder.head("forward"), builder.head("backward"))
        head[number] = sum(
            prices.operator_s(op) for graph in graphs for op in graph.operators if not isinstance(op, CollectiveOp)
        )
        embed[number] = sum(
            prices.operator_s(op) for op in builder.embedding("forward").operators if not isinstance(op, CollectiveOp)
        )
    return head[inverse], embed[inverse]


def _transfers(space: Space, times: LayerTimes) -> Float:
    """Seconds of one transfer between stages; inside a node where any pair of them is."""
    first, inverse = space.distinct(("tp", "sp", "cp", "sequence_parallel", "micro_batch", "pp", "dp"))
    found = np.zeros(len(first))
    per_node = times.inputs.cluster.node.num_devices
    for number, row in enumerate(first.tolist()):
        layout = space.layout(row)
        if layout.pp == 1:
            continue
        sent, _ = boundary_bytes(_asked(times.inputs, layout, space, row))
        inside = layout.world_size // layout.pp < per_node
        op = CollectiveOp(
            "send_recv", max(1.0, sent), 2 if inside else layout.pp, space.model.dtype, "embed",
            group="" if inside else "pp",
        )  # fmt: skip
        found[number] = times.prices(space, row).flow(op)[0]
    return found[inverse]


def _after(space: Space, times: LayerTimes, inputs: StepInputs) -> Float:
    """Reduction of gradients that nothing is left to hide, and parameters gathered at the end."""
    keys = ("tp", "sp", "cp", "ep", "etp", "pp", "vpp", "dp", "zero", "dp_overlap")
    first, inverse = space.distinct(keys)
    found = np.empty(len(first))
    for number, row in enumerate(first.tolist()):
        layout, prices = space.layout(row), times.prices(space, row)
        asked = _asked(inputs, layout, space, row)
        overlapped = DP_OVERLAPS[int(space.columns["dp_overlap"][row])] != "none"
        middle = min(1, layout.pp - 1)
        traffic = stage_traffic(asked, middle if layout.pp < 3 else 1)
        reduce = [prices.flow(op)[0] for op, _ in traffic.reduce]
        gather = [prices.flow(op)[0] for op in traffic.gather]
        early = DP_OVERLAPS[int(space.columns["dp_overlap"][row])] == "both"
        # The last bucket alone is sure to be exposed; without overlap all of them are.
        found[number] = (min(reduce, default=0.0) if overlapped else sum(reduce)) + (0.0 if early else sum(gather))
    return found[inverse]


def _asked(inputs: StepInputs, layout: Layout, space: Space, row: int) -> StepInputs:
    return replace(
        inputs,
        layout=layout,
        job=space.job(row),
        schedule="",
        dp_overlap=DP_OVERLAPS[int(space.columns["dp_overlap"][row])],
    )
