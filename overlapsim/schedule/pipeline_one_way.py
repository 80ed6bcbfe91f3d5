"""Schedules in which every micro-batch passes the devices in one direction: GPipe, 1F1B, interleaved, zero bubble H."""

from __future__ import annotations

from overlapsim.errors import LayoutError
from overlapsim.schedule.pipeline import BACKWARD, FORWARD, Action, PipelineSchedule, Slot
from overlapsim.schedule.pipeline_line import Line


def gpipe(num_devices: int, num_micro_batches: int) -> PipelineSchedule:
    """All forwards, then all backwards (Huang et al., 2019); micro-batches in order both ways, as torch runs them."""
    lines = []
    for device in range(num_devices):
        line = Line((device,))
        line.forward(times=num_micro_batches)
        line.backward(times=num_micro_batches)
        lines.append(line.slots)
    return _one_stage_each("gpipe", lines, num_micro_batches)


def one_f_one_b(num_devices: int, num_micro_batches: int) -> PipelineSchedule:
    """1F1B with a flush: device d runs ``p - d - 1`` forwards ahead, then alternates (Narayanan et al., 2021)."""
    lines = []
    for device in range(num_devices):
        line = Line((device,))
        ahead = min(num_devices - device - 1, num_micro_batches)
        line.forward(times=ahead)
        for _ in range(num_micro_batches - ahead):
            line.forward()
            line.backward()
        line.backward(times=ahead)
        lines.append(line.slots)
    return _one_stage_each("1f1b", lines, num_micro_batches)


def zb_h1(num_devices: int, num_micro_batches: int) -> PipelineSchedule:
    """Zero bubble with 1F1B's memory: device d puts weight gradients off by d micro-batches (Qi et al., 2401.10241)."""
    return _zero_bubble("zb_h1", num_devices, num_micro_batches, ahead_per_hop=1)


def zb_h2(num_devices: int, num_micro_batches: int) -> PipelineSchedule:
    """Zero bubble with about twice that memory: ``2 (p - d) - 1`` forwards ahead, weight gradients put off by 2 d."""
    return _zero_bubble("zb_h2", num_devices, num_micro_batches, ahead_per_hop=2)


def _zero_bubble(name: str, num_devices: int, num_micro_batches: int, ahead_per_hop: int) -> PipelineSchedule:
    """Forwards in flight plus weight gradients put off are as many on every device: what the first device needs."""
    lines = []
    for device in range(num_devices):
        line = Line((device,))
        ahead = min(ahead_per_hop * (num_devices - device - 1), num_micro_batches)
        line.forward(times=ahead)
        for micro_batch in range(num_micro_batches):
            if ahead + micro_batch < num_micro_batches:
                line.forward()
            line.input_grad()
            if line.num_put_off > ahead_per_hop * device:
                line.weight_grad()
        line.all_weight_grads()
        lines.append(line.slots)
    return _one_stage_each(name, lines, num_micro_batches)


def interleaved(
    num_devices: int,
    num_micro_batches: int,
    stages_per_device: int = 2,
    group_size: int | None = None,
    *,
    pairs: bool = False,
) -> PipelineSchedule:
    """Interleaved 1F1B in Megatron's order: device d holds stages d, d + p, d + 2 p, ... (Narayanan et al., 2021).

    Micro-batches go in groups: a device runs one group through its first
    stage, then through its second, and so on; backwards mirror that.  Device
    d runs ``2 (p - d - 1) + (v - 1) group_size`` forwards ahead.

    Parameters
    ----------
    num_devices, num_micro_batches : int
    stages_per_device : int, at least 2
    group_size : int, optional
        Micro-batches of a group, at least `num_devices`, which is the default
        (``--microbatch-group-size-per-virtual-pipeline-stage``).
    pairs : bool
        Run each forward of the steady state together with the backward that
        follows it, one forward more ahead, as Megatron does to hide the
        all-to-alls of experts (``--overlap-moe-expert-parallel-comm``).

    Raises
    ------
    LayoutError
        If there are less than two stages a device, a group is smaller than
        the pipeline, or the last group would be.
    """
    p, m, v = num_devices, num_micro_batches, stages_per_device
    group = p if group_size is None else group_size
    if v < 2:
        raise LayoutError(f"interleaved has {v} stage a device; expected at least 2: take 1f1b for one")
    if group < p:
        raise LayoutError(f"group_size is {group}; expected at least the {p} devices of the pipeline")
    if m % group and (m % group) < p:
        raise LayoutError(
            f"{m} micro-batches in groups of {group} leave a group of {m % group}; expected the last group to have "
            f"none or at least the {p} devices of the pipeline: change the batch size, or group_size"
        )
    order = [
        (chunk, micro_batch)
        for start in range(0, m, group)
        for chunk in range(v)
        for micro_batch in range(start, min(start + group, m))
    ]
    lines: list[list[Slot]] = []
    for device in range(p):
        forwards = [Action(FORWARD, chunk * p + device, mb) for chunk, mb in order]
        backwards = [Action(BACKWARD, (v - 1 - chunk) * p + device, mb) for chunk, mb in order]
        ahead = min(2 * (p - device - 1) + (v - 1) * group + pairs, len(order))
        line: list[Slot] = [(forward,) for forward in forwards[:ahead]]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            line += [(forward, backward)] if pairs else [(forward,), (backward,)]
        line += [(backward,) for backward in backwards[len(order) - ahead :]]
        lines.append(line)
    placement = [[stage % p for stage in range(v * p)]]
    name = "interleaved_pairs" if pairs else "interleaved"
    return PipelineSchedule.of_slots(name, lines, placement=placement, copy_of=[0] * m)


def interleaved_pairs(
    num_devices: int, num_micro_batches: int, stages_per_device: int = 2, group_size: int | None = None
) -> PipelineSchedule:
    """Interleaved 1F1B with F&B pairs, see :func:`interleaved`."""
    return interleaved(num_devices, num_micro_batches, stages_per_device, group_size, pairs=True)


def _one_stage_each(name: str, lines: list[list[Slot]], num_micro_batches: int) -> PipelineSchedule:
    placement = [list(range(len(lines)))]
    return PipelineSchedule.of_slots(name, lines, placement=placement, copy_of=[0] * num_micro_batches)
