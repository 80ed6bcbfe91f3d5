"""Least memory of every candidate of a space, in arrays: states of layers, kept activations, what runtimes take."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from overlapsim.planner.space import RECOMPUTES, SCHEDULE_NAMES, Space
from overlapsim.step.inputs import StepInputs
from overlapsim.step.traffic import precision_of
from overlapsim.workload.activations import layer_activations
from overlapsim.workload.memory import CONTEXT_BYTES, FRAGMENTATION
from overlapsim.workload.recompute import Recompute
from overlapsim.workload.stage_weights import LocalParameters, layer_parameters_local

Float = npt.NDArray[np.float64]
_STATE_KEYS: Final = ("tp", "ep", "etp")
_KEPT_KEYS: Final = ("tp", "sp", "cp", "ep", "etp", "sequence_parallel", "recompute")


def least_bytes(space: Space, inputs: StepInputs) -> Float:
    """Bytes that a GPU of the first stage holds at least.

    Layers of the model count by their mean, stages by the floor of their
    share, so that no candidate is charged more than `step_memory` charges.
    """
    c = space.columns
    layers = np.floor(space.model.num_layers / (c["pp"].astype(float) * c["vpp"])) * c["vpp"]
    dense, expert = _parameters(space)
    width = precision_of(inputs)
    replicas = c["sp"].astype(float) * c["cp"] * c["dp"]
    expert_replicas = c["tp"].astype(float) * replicas / (c["ep"] * c["etp"])
    states = np.zeros(len(space))
    for level, bytes_each in ((3, width.parameter_bytes), (2, width.gradient_bytes), (1, width.optimizer_bytes)):
        sharded = c["zero"] >= level
        states += bytes_each * (dense / np.where(sharded, replicas, 1) + expert / np.where(sharded, expert_replicas, 1))
    held = _in_flight(space) * _kept(space, inputs) * c["micro_batch"]
    return layers * states + (1 + FRAGMENTATION) * held + CONTEXT_BYTES


def _parameters(space: Space) -> tuple[Float, Float]:
    """Least dense and expert parameters of a layer on a rank, over the kinds of layers."""
    first, inverse = space.distinct(_STATE_KEYS)
    dense, expert = np.empty(len(first)), np.empty(len(first))
    for number, row in enumerate(first.tolist()):
        found = [layer_parameters_local(space.model, layer, space.layout(row)) for layer in space.model.kinds]
        least = LocalParameters(min(f.dense for f in found), min(f.expert for f in found))
        dense[number], expert[number] = least.dense, least.expert
    return dense[inverse], expert[inverse]


def _kept(space: Space, inputs: StepInputs) -> Float:
    """Least bytes that a layer keeps of a micro-batch of one sequence."""
    first, inverse = space.distinct(_KEPT_KEYS)
    kept = np.empty(len(first))
    for number, row in enumerate(first.tolist()):
        recompute = Recompute.parse(RECOMPUTES[int(space.columns["recompute"][row])])
        layout = space.layout(row)
        kept[number] = min(
            recompute.kept_bytes([layer_activations(space.model, layer, layout, space.sequence, 1, inputs.recipe)])
            for layer in space.model.kinds
        )
    return kept[inverse]


def _in_flight(space: Space) -> Float:
    """Layers times micro-batches that the first device keeps at its peak, by what each schedule is known to keep."""
    c = space.columns
    pp, vpp = c["pp"].astype(float), c["vpp"].astype(float)
    micro = space.global_batch / (c["dp"].astype(float) * c["micro_batch"])
    chunk = np.floor(space.model.num_layers / (pp * vpp))
    everything = micro * vpp
    # Chunks in flight on the first device.
    in_line = np.where(vpp > 1, pp * vpp + pp - 1, pp)
    gpipe = c["schedule"] == SCHEDULE_NAMES.index("gpipe")
    two_way = np.isin(c["schedule"], [SCHEDULE_NAMES.index(n) for n in ("zbv", "dualpipe", "dualpipev")])
    chunks = np.where(gpipe, everything, np.where(two_way, pp, np.minimum(in_line, everything)))
    layers: Float = np.minimum(chunks, everything) * chunk
    return layers
