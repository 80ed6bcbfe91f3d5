"""Published bubbles of pipeline schedules: a first sieve, and what the engine must give on equal blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class StageTimes:
    """Times of one stage, all stages alike, in any one unit; integers stay exact.

    Attributes
    ----------
    forward, input_grad, weight_grad : of one micro-batch on one stage
    pair : of an F&B pair; None: as long as its parts one after the other
    """

    forward: float
    input_grad: float
    weight_grad: float
    pair: float | None = None

    @property
    def backward(self) -> float:
        """Time of a full backward: both halves."""
        return self.input_grad + self.weight_grad

    @property
    def joint(self) -> float:
        """Time of an F&B pair."""
        return self.forward + self.backward if self.pair is None else self.pair


Bubble = Callable[[int, int, StageTimes], float | None]
"""Bubble of (devices, stages a device, times): the most that any device idles between its first action and its last,
transfers taking no time and micro-batches enough to fill the pipeline; None where no closed form holds."""


def full_bubble(num_devices: int, stages_per_device: int, times: StageTimes) -> float | None:
    """GPipe and 1F1B: ``(p - 1)(F + B)``."""
    return (num_devices - 1) * (times.forward + times.backward)


def interleaved_bubble(num_devices: int, stages_per_device: int, times: StageTimes) -> float | None:
    """Interleaved: ``(p - 1)(F + B)`` with F and B of one stage, 1/v of a device's (Narayanan et al., 2021)."""
    return (num_devices - 1) * (times.forward + times.backward)


def zb_h1_bubble(num_devices: int, stages_per_device: int, times: StageTimes) -> float | None:
    """ZB-H1: ``(p - 1)(F + B - 2 W)`` as published (2401.10241); where W exceeds F an input gradient a hop is left."""
    return (num_devices - 1) * max(times.forward + times.backward - 2 * times.weight_grad, times.input_grad)


def zb_h2_bubble(num_devices: int, stages_per_device: int, times: StageTimes) -> float | None:
    """ZB-H2: ``(p - 1)(F + B - 3 W)`` as published (2401.10241), not less than 0 nor than what I exceeds F by a hop.

    With at least ``2 p - 1`` micro-batches.  Devices start and end one after
    the other, so the step takes ``(p - 1) F`` longer unless the optimizer of
    each device runs on its own.
    """
    published = times.forward + times.backward - 3 * times.weight_grad
    return (num_devices - 1) * max(published, times.input_grad - times.forward, 0)


def zbv_bubble(num_devices: int, stages_per_device: int, times: StageTimes) -> float | None:
    """ZBV: 0 where F, I and W are equal (2401.10241); no closed form is known elsewhere."""
    return 0 if times.forward == times.input_grad == times.weight_grad else None


def dualpipe_bubble(num_devices: int, stages_per_device: int, times: StageTimes) -> float | None:
    """DualPipe: ``(p / 2 - 1)(F&B + B - 3 W)`` (DualPipe repository), where it is exact.

    That is where ``F == I >= W``, and either F&B takes as long as F and B one
    after the other or there are at most 4 devices.  Where F&B is shorter it
    is an upper bound, since more than one pair a hop becomes shorter.
    """
    exact = times.forward == times.input_grad >= times.weight_grad and (
        num_devices <= 4 or times.joint == times.forward + times.backward
    )
    return (num_devices // 2 - 1) * (times.joint + times.backward - 3 * times.weight_grad) if exact else None


def dualpipev_bubble(num_devices: int, stages_per_device: int, times: StageTimes) -> float | None:
    """DualPipeV: as DualPipe with as many stages, ``2 p``."""
    return dualpipe_bubble(2 * num_devices, 1, times)
