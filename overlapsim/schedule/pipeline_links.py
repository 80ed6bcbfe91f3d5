"""What passes between the devices of a pipeline: transfers, who waits for them, and when receives are posted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from overlapsim.errors import ProgramError
from overlapsim.schedule.pipeline import FORWARD, PipelineSchedule
from overlapsim.schedule.pipeline_steps import Steps
from overlapsim.schedule.pipeline_work import PipelineWork, Transfer
from overlapsim.schedule.program import Int

P2pMode = Literal["overlapped", "steady", "blocking"]
P2P_MODES: Final[tuple[P2pMode, ...]] = get_args(P2pMode)


@dataclass(frozen=True, eq=False)
class Links:
    """Transfers of one step, and what waits for what; nodes are steps, then transfers.

    Attributes
    ----------
    num_steps : int
    producer : int64 array of shape (transfers,): action whose result is sent
    prices : distinct transfers, with the devices that each leaves and reaches
    price_of : int64 array of shape (transfers,): number in `prices`
    wait : int64 array of shape (waits, 2): a node, and a node that is to start after it
    post : int64 array of shape (posts, 2): a node, and a transfer that its target joins after it
    line : int64 array of shape (lines, 2): nodes of one stream that follow each other
    """

    num_steps: int
    producer: Int
    prices: tuple[tuple[Transfer, int, int], ...]
    price_of: Int
    wait: Int
    post: Int
    line: Int

    @property
    def num_nodes(self) -> int:
        """Number of steps and transfers."""
        return self.num_steps + len(self.producer)


def link(schedule: PipelineSchedule, steps: Steps, work: PipelineWork, mode: P2pMode) -> Links:
    """Find the transfers and the waits of a schedule.

    In all modes a transfer follows the step that produces it and the step
    that consumes it follows the transfer; a stage and the next on one device
    need none.  ``steady`` and ``blocking`` add that the sender's next step
    waits for the transfer, the former before the first backward of a device
    is due and after its last forward only.  ``blocking`` adds that a receive
    is posted when the step before the one that needs it has ended, and, if
    that step sends in the same direction, when this has been sent: two calls
    one after the other, where a forward and a gradient are exchanged in one.

    Raises
    ------
    ProgramError
        If the mode is unknown.
    """
    if mode not in P2P_MODES:
        raise ProgramError(f"p2p mode {mode!r} is unknown; expected one of {', '.join(P2P_MODES)}")
    s = schedule
    producer, consumer = s.hand_overs
    apart = s.device[producer] != s.device[consumer]
    producer, consumer = producer[apart], consumer[apart]
    prices, price_of = _price(s, work, producer, consumer)
    free = price_of < 0
    direct = np.stack((steps.of_action[producer[free]], steps.of_action[consumer[free]]), axis=1)
    producer, consumer, price_of = producer[~free], consumer[~free], price_of[~free]
    # Along each channel in the order of production.
    channel = s.device[producer] * s.num_devices + s.device[consumer]
    order = np.lexsort((producer, channel))
    producer, consumer, price_of, channel = producer[order], consumer[order], price_of[order], channel[order]
    node = steps.num + np.arange(len(producer))
    sent_by, needed_by = steps.of_action[producer], steps.of_action[consumer]
    waits = [direct, np.stack((sent_by, node), axis=1), np.stack((node, needed_by), axis=1)]
    posts = np.empty((0, 2), np.int64)
    if mode != "overlapped":
        has_next = np.append(steps.device[1:] == steps.device[:-1], False)[sent_by]
        held = has_next & (_outside_steady(s, steps)[sent_by] if mode == "steady" else True)
        waits.append(np.stack((node[held], sent_by[held] + 1), axis=1))
    if mode == "blocking":
        posts = _posts(s, steps, node, producer, needed_by)
    return Links(
        steps.num,
        producer,
        prices,
        price_of,
        np.concatenate(waits),
        posts,
        np.concatenate((_neighbours(steps.device, 0), _neighbours(channel, steps.num))),
    )


def _price(
    schedule: PipelineSchedule, work: PipelineWork, producer: Int, consumer: Int
) -> tuple[tuple[tuple[Transfer, int, int], ...], Int]:
    """Distinct transfers between devices, and the number of each, -1 for those that take no time."""
    s = schedule
    code = (s.device[producer] * s.num_devices + s.device[consumer]) * s.num_stages + s.stage[producer]
    code = code * s.num_stages + s.stage[consumer]
    _, some, which = np.unique(code, return_index=True, return_inverse=True)
    prices: list[tuple[Transfer, int, int]] = []
    numbers = []
    for a, b in zip(producer[some].tolist(), consumer[some].tolist(), strict=True):
        source, target = int(s.device[a]), int(s.device[b])
        price = work.transfer(source, target, int(s.stage[a]), int(s.stage[b]))
        numbers.append(-1 if price is None else len(prices))
        if price is not None:
            prices.append((price, source, target))
    return tuple(prices), np.array(numbers, np.int64)[which]


def _outside_steady(schedule: PipelineSchedule, steps: Steps) -> npt.NDArray[np.bool_]:
    """True for steps before the forward that comes with a device's first backward, and behind its last forward's."""
    forward = schedule.kind[steps.first] == FORWARD
    backward = schedule.kind[steps.last] != FORWARD
    outside = np.zeros(steps.num, np.bool_)
    for device in range(schedule.num_devices):
        own = np.flatnonzero(steps.device == device)
        if not len(own):
            continue
        first = own[np.argmax(backward[own])]
        last = own[len(own) - 1 - np.argmax(forward[own][::-1])]
        # Forward and backward that alternate are steady from the forward on, and up to the backward.
        outside[own] = (own < first - (not forward[first])) | (own > last + (not backward[last]))
    return outside


def _posts(schedule: PipelineSchedule, steps: Steps, node: Int, producer: Int, needed_by: Int) -> Int:
    """What each receive comes after: the receiver's step before, and what that sends in the same direction."""
    has_before = np.insert(steps.device[1:] == steps.device[:-1], 0, False)[needed_by]
    node, before, forward = node[has_before], needed_by[has_before] - 1, schedule.kind[producer[has_before]] == FORWARD
    after_step = np.stack((before, node), axis=1)
    # What each step sends, by direction.
    sends = np.full((2, steps.num), -1, np.int64)
    all_forward = (schedule.kind[producer] == FORWARD).astype(np.int64)
    sends[all_forward, steps.of_action[producer]] = steps.num + np.arange(len(producer))
    sent = sends[forward.astype(np.int64), before]
    after_send = np.stack((sent, node), axis=1)[sent >= 0]
    return np.concatenate((after_step, after_send))


def _neighbours(row: Int, start: int) -> Int:
    """Numbers of entries that follow each other with the same value, counted from `start`."""
    here = np.flatnonzero(row[1:] == row[:-1]) + start
    return np.stack((here, here + 1), axis=1)
