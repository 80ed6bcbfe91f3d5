"""How many layers of each kind a pipeline device holds, and how many stand before it: for many layouts at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from overlapsim.workload.model import ModelSpec
from overlapsim.workload.stages import spread_layers

Float = npt.NDArray[np.float64]
DEVICES: Final = ("first", "middle", "last")


@dataclass(frozen=True, eq=False)
class StageCounts:
    """Layers of pipelines in which stage s lies on device s modulo pp, by device of `DEVICES` and kind of layer.

    Attributes
    ----------
    own : array of shape (pipelines, devices, kinds): layers that a device holds
    before : of the same shape: layers of the stages that a micro-batch passes before it comes to the device
    place : array of shape (pipelines, devices): number of the device
    whole : array of shape (pipelines, kinds): layers of the model
    alike : bool array of shape (pipelines,): whether all chunks hold the same
    """

    own: Float
    before: Float
    place: Float
    whole: Float
    alike: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, model: ModelSpec, pipelines: Sequence[tuple[int, int]]) -> StageCounts:
        """Count for each (pp, vpp).

        Examples
        --------
        >>> from overlapsim.workload.families import gpt
        >>> model = gpt(num_layers=8, hidden=8, num_heads=2, vocabulary=10, max_positions=4)
        >>> counts = StageCounts.of(model, [(4, 2)])
        >>> counts.own[0, :, 0].tolist(), counts.before[0, :, 0].tolist()
        ([2.0, 2.0, 2.0], [0.0, 2.0, 3.0])
        """
        kinds = list(model.kinds)
        place_of = {id(layer): kinds.index(layer) for layer in {id(layer): layer for layer in model.layers}.values()}
        held = np.zeros((len(model.layers), len(kinds)))
        held[np.arange(len(held)), [place_of[id(layer)] for layer in model.layers]] = 1.0
        up_to = np.concatenate((np.zeros((1, len(kinds))), np.cumsum(held, axis=0)))
        whole = up_to[-1] + model.num_mtp_layers * held[-1]
        shape = (len(pipelines), len(DEVICES), len(kinds))
        own, before = np.zeros(shape), np.zeros(shape)
        place = np.zeros(shape[:2])
        for number, (pp, vpp) in enumerate(pipelines):
            ends = np.concatenate(([0], np.cumsum(spread_layers(len(held), pp * vpp))))
            stages = up_to[ends[1:]] - up_to[ends[:-1]]
            place[number] = (0, pp // 2, pp - 1)
            for at, device in enumerate((0, pp // 2, pp - 1)):
                own[number, at] = stages[device::pp].sum(axis=0)
                before[number, at] = stages[:device].sum(axis=0)
            # Layers of multi-token prediction stand behind the last one.
            own[number, place[number] == pp - 1] += model.num_mtp_layers * held[-1]
        alike = np.array([len(kinds) == 1 and len(held) % (pp * vpp) == 0 for pp, vpp in pipelines], np.bool_)
        return cls(own, before, place, np.tile(whole, (len(pipelines), 1)), alike)
