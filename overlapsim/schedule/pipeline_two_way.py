"""Schedules in which micro-batches pass the devices both ways: V-shaped placement, and two copies of the model."""

from __future__ import annotations

from overlapsim.errors import LayoutError
from overlapsim.schedule.pipeline import PipelineSchedule, Slot
from overlapsim.schedule.pipeline_line import Line


def zbv(num_devices: int, num_micro_batches: int) -> PipelineSchedule:
    """Zero bubble V: device d holds stages d and ``2 p - 1 - d``; the last one turns round (Qi et al., 2401.10241).

    Free of bubbles where forward, input gradient and weight gradient take
    equally long, with the memory of 1F1B.

    Raises
    ------
    LayoutError
        If there are fewer than ``2 p - 1`` micro-batches.
    """
    p, m = num_devices, num_micro_batches
    if m < 2 * p - 1:
        raise LayoutError(
            f"zbv has {m} micro-batches on {p} devices; expected at least 2 x devices - 1 = {2 * p - 1}: take more "
            "micro-batches or fewer devices"
        )
    lines = []
    for device in range(p):
        line = Line((device, 2 * p - 1 - device))
        line.forward(0, times=2 * (p - device) - 1)
        for _ in range(device):
            line.forward(1)
            line.forward(0)
        for _ in range(p - device):
            line.forward(1)
            line.input_grad(1)
            line.weight_grad(1)
        forwards_left = m - (2 * p - device - 1)
        for step in range(m - p):
            if step < forwards_left:
                line.forward(0)
            line.input_grad(0)
            line.weight_grad(0)
            line.forward(1)
            line.input_grad(1)
            line.weight_grad(1)
        # No forwards are left: input gradients first, since others wait for them.
        for _ in range(device):
            line.input_grad(0)
            line.input_grad(1)
        for _ in range(p - device):
            line.input_grad(0)
            line.weight_grad(0)
        for chunk in (1, 0):
            line.all_weight_grads(chunk)
        lines.append(line.slots)
    return _v_shaped("zbv", lines, m)


def dualpipev(num_devices: int, num_micro_batches: int) -> PipelineSchedule:
    """DualPipeV: DualPipe folded in the middle, one copy of the model, two stages a device (DualPipe repository).

    Raises
    ------
    LayoutError
        If there are fewer micro-batches than stages, ``2 p``.
    """
    p, m = num_devices, num_micro_batches
    if m < 2 * p:
        raise LayoutError(
            f"dualpipev has {m} micro-batches on {p} devices; expected at least the 2 x devices = {2 * p} stages: take "
            "more micro-batches or fewer devices"
        )
    lines = []
    for device in range(p):
        line = Line((device, 2 * p - 1 - device))
        _two_streams(line, device, p, m)
        lines.append(line.slots)
    return _v_shaped("dualpipev", lines, m)


def dualpipe(num_devices: int, num_micro_batches: int) -> PipelineSchedule:
    """DualPipe: two copies of the model, micro-batches enter at both ends (DeepSeek-V3, 2412.19437; its repository).

    The first half of the micro-batches runs from device 0 to the last, the
    second half the other way; device d holds stage d of one copy and stage
    ``p - 1 - d`` of the other.

    Raises
    ------
    LayoutError
        If devices or micro-batches are odd in number, or there are fewer
        than ``2 p`` micro-batches.
    """
    p, m = num_devices, num_micro_batches
    if p % 2:
        raise LayoutError(f"dualpipe has {p} devices; expected an even number: its two directions meet in the middle")
    if m % 2 or m < 2 * p:
        raise LayoutError(
            f"dualpipe has {m} micro-batches on {p} devices; expected an even number, at least 2 x devices = {2 * p}: "
            "half of them enter at each end"
        )
    lines = []
    for device in range(p):
        stages, first = (device, p - 1 - device), (0, m // 2)
        # Chunk 0 is the copy that is nearer to its start.
        line = Line(stages, first) if device < p // 2 else Line(stages[::-1], first[::-1])
        _two_streams(line, min(device, p - 1 - device), p // 2, m // 2)
        lines.append(line.slots)
    placement = [list(range(p)), list(reversed(range(p)))]
    copy_of = [0] * (m // 2) + [1] * (m // 2)
    return PipelineSchedule.of_slots("dualpipe", lines, placement=placement, copy_of=copy_of)


def _two_streams(line: Line, place: int, num_places: int, per_chunk: int) -> None:
    """Order of one device of DualPipe or DualPipeV: chunk 0 is `place` hops from its start, chunk 1 on its way back.

    Parameters
    ----------
    num_places : devices from a start to where the two chunks meet
    per_chunk : micro-batches of each chunk
    """
    hops_to_middle = num_places - place - 1
    line.forward(0, times=2 * hops_to_middle)
    for _ in range(place + 1):
        line.forward(0)
        line.forward(1)
    for _ in range(hops_to_middle):
        line.input_grad(1)
        line.weight_grad()
        line.forward(1)
    for step in range(per_chunk - 2 * num_places + place + 1):
        if step == 0 and hops_to_middle == 0:
            # One after the other in the middle: whoever waits for either gets it sooner.
            line.forward(0)
            line.backward(1)
        else:
            line.pair(0, 1)
        line.pair(1, 0)
    for _ in range(hops_to_middle):
        line.backward(1)
        line.pair(1, 0)
    # Of the last backwards on both chunks the later half puts its weight gradients off, to fill the drain.
    for number in range(2 * (place + 1)):
        put_off = number > place
        chunk = 1 - number % 2
        if put_off:
            line.input_grad(chunk)
        else:
            line.backward(chunk)
    for _ in range(hops_to_middle):
        line.weight_grad()
        line.input_grad(0)
    line.all_weight_grads()


def _v_shaped(name: str, lines: list[list[Slot]], num_micro_batches: int) -> PipelineSchedule:
    p = len(lines)
    placement = [[*range(p), *reversed(range(p))]]
    return PipelineSchedule.of_slots(name, lines, placement=placement, copy_of=[0] * num_micro_batches)
