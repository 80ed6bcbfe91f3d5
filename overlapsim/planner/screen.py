"""A lower bound of the engine's step time from the times of layers, for arrays of candidates."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from overlapsim.planner.space import SCHEDULE_NAMES, TWO_WAY
from overlapsim.planner.stage_counts import DEVICES, StageCounts
from overlapsim.schedule.pipeline_kinds import SCHEDULES

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int32]
ROUNDING: Final = 1 - 1e-6
"""Times are whole picoseconds, per unit of a block."""
PAIRED: Final = tuple(name for name, kind in SCHEDULES.items() if kind.has_pairs)
SPLIT: Final = tuple(name for name, kind in SCHEDULES.items() if kind.splits_backward)
BLOCKING: Final = ("1f1b", "gpipe")
"""Schedules whose transfers are blocking by default (`StepInputs.p2p_mode`)."""


@dataclass(frozen=True, eq=False)
class Parts:
    """Seconds that a step is made of; arrays of shape (candidates,), or of what numpy broadcasts to it.

    Attributes
    ----------
    forward, backward, input_grad, weight_grad : one micro-batch through a layer, one entry a kind: what is computed
        again is in backward and input_grad
    embed_forward, embed_backward, head_forward, head_backward : on the first stage, and on the last
    transfer : between two stages
    after : what of data parallelism and the optimizer nothing hides
    reduced : from the first gradient that the first device reduces, with all that it reduces, to the end
    """

    forward: tuple[Float, ...]
    backward: tuple[Float, ...]
    input_grad: tuple[Float, ...]
    weight_grad: tuple[Float, ...]
    embed_forward: Float
    embed_backward: Float
    head_forward: Float
    head_backward: Float
    transfer: Float
    after: Float
    reduced: Float

    def scaled(self, factor: Float) -> Parts:
        """All seconds `factor` times."""
        changed: dict[str, Any] = {}
        for entry in fields(Parts):
            value = getattr(self, entry.name)
            changed[entry.name] = tuple(v * factor for v in value) if isinstance(value, tuple) else value * factor
        return Parts(**changed)


def is_schedule(schedule: Int, names: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    """Which candidates have one of these schedules."""
    found = np.zeros(len(SCHEDULE_NAMES), dtype=np.bool_)
    found[[SCHEDULE_NAMES.index(name) for name in names]] = True
    chosen: npt.NDArray[np.bool_] = found[schedule]
    return chosen


def step_bounds(
    parts: Parts,
    counts: StageCounts,
    pipeline: npt.NDArray[np.intp],
    schedule: Int,
    pp: Int,
    vpp: Int,
    micro_batches: Float,
) -> Float:
    """Seconds below which no candidate's simulated step can be.

    A device runs its blocks of all micro-batches one after another. The
    first waits until a micro-batch has come through the stages before, and
    behind the last gradient it must go back through them. Taken for the
    first, the middle and the last device, the largest counts. What starts at
    both ends of a pipeline is only bound by the mean of all devices.
    The first device's reductions take their time from its last backwards on.

    Parameters
    ----------
    parts : seconds
    counts, pipeline : layers of stages, and which entry of them each candidate has
    schedule, pp, vpp, micro_batches : of each candidate

    Returns
    -------
    array of shape (candidates,)
    """
    split, two_way = is_schedule(schedule, SPLIT), is_schedule(schedule, TWO_WAY)
    blocking = is_schedule(schedule, BLOCKING) & (pp > 1)
    best = _mean_load(parts, counts, pipeline, split, pp, micro_batches) + parts.after
    for device in range(len(DEVICES)):
        own, before = counts.own[pipeline, device], counts.before[pipeline, device]
        place = counts.place[pipeline, device]
        forward = _sum(own, parts.forward)
        grads = np.where(split, _sum(own, parts.input_grad), _sum(own, parts.backward))
        delayed = np.where(split, _sum(own, parts.weight_grad), 0.0)
        fill, drain = _sum(before, parts.forward), _sum(before, parts.backward)
        way = place * parts.transfer
        first, last = place == 0, place == pp - 1
        forward = forward + first * parts.embed_forward + last * parts.head_forward
        grads = grads + first * parts.embed_backward + last * parts.head_backward
        fill = fill + ~first * parts.embed_forward + way
        drain = np.where(split, _sum(before, parts.input_grad), drain + ~first * parts.embed_backward) + way
        # Behind a transfer that blocks, the sender's next action waits: forwards down, gradients up.
        sends = blocking * (~last * 1.0 + ~first) * parts.transfer
        load = micro_batches * (forward + grads + delayed) + np.maximum(0.0, micro_batches - 1) * sends
        # Weight gradients that are put off, those of the ends too, fill the time in which the last gradient goes back.
        delayed = delayed + first * parts.embed_backward + last * parts.head_backward
        drain = np.where(split, np.maximum(0.0, drain - micro_batches * delayed), drain)
        best = np.maximum(best, np.where(two_way, 0.0, fill + load + drain + parts.after))
        if device == 0:
            late = split | two_way | is_schedule(schedule, PAIRED)
            last_backwards = _last_backwards(grads, parts.embed_backward, counts.alike[pipeline], pp, vpp)
            best = np.maximum(best, np.where(late, 0.0, load - last_backwards + parts.reduced))
    bounds: Float = best * ROUNDING
    return bounds


def _last_backwards(grads: Float, embed: Float, alike: npt.NDArray[np.bool_], pp: Int, vpp: Int) -> Float:
    """Most time that the first device spends from its first backward that makes a last gradient on.

    Interleaved, that is the last micro-batch in the last chunk, and then a
    group of as many as there are stages in every other chunk.
    """
    even = ((vpp - 1) * pp + 1) / vpp * (grads - embed) + pp * embed
    return np.where(vpp == 1, grads, np.where(alike, even, pp * grads))


def _mean_load(
    parts: Parts,
    counts: StageCounts,
    pipeline: npt.NDArray[np.intp],
    split: npt.NDArray[np.bool_],
    pp: Int,
    micro_batches: Float,
) -> Float:
    """Work of all devices over their number."""
    whole = counts.whole[pipeline]
    passes = _sum(whole, parts.forward) + np.where(
        split, _sum(whole, parts.input_grad) + _sum(whole, parts.weight_grad), _sum(whole, parts.backward)
    )
    ends = parts.embed_forward + parts.embed_backward + parts.head_forward + parts.head_backward
    return micro_batches * (passes + ends) / pp


def _sum(counts: Float, seconds: tuple[Float, ...]) -> Float:
    """Layers of each kind times their seconds."""
    total: Float = counts[:, 0] * seconds[0]
    for kind in range(1, len(seconds)):
        total = total + counts[:, kind] * seconds[kind]
    return total
