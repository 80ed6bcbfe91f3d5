"""Random programs that cover the whole engine contract, from a seed: the input of agreement and property tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import BLOCKS, FLOW, HOST, Program
from overlapsim.testing.draws import Draw
from overlapsim.testing.features import features, happenings
from overlapsim.testing.machines import Device, Scene, draw_scene

__all__ = ["features", "happenings", "random_program"]

# Fractions of a capacity that one task asks for; thirds and tenths make the last bits of sums matter.
_FRACTIONS = (0.1, 0.2, 0.3, 1 / 3, 0.5, 0.6, 0.7, 1.0, 1.5)
_WEIGHTS = (0.3, 0.5, 2.0, 3.0, 49.0)


@dataclass
class _Op:
    """One kernel or transfer, as one task, one task per device, or the members of one group."""

    kind: int
    units: int
    tasks: list[int]


def random_program(seed: int, *, large: bool | None = None) -> Program:
    """Draw a valid program; equal seeds give equal programs on every platform numpy supports.

    The programs are small and dense in ties: 5 to 25 tasks, up to 20 units
    each, times from a set of one to five values.  One in twenty-five is
    larger (up to 100 tasks and 150 units).  Between them they have every
    feature of section 1 of ``docs/program.md`` (see :func:`features` in
    :mod:`overlapsim.testing.features`).  Gates and groups may deadlock; a
    minority does.

    Parameters
    ----------
    seed : int, >= 0
    large : bool, optional
        Force a large or a small program; by default the seed decides.

    Examples
    --------
    >>> random_program(7) == random_program(7)
    True
    """
    draw = Draw(seed)
    big = draw.chance(0.04)
    if large is not None:
        big = large
    builder = ProgramBuilder()
    scene = draw_scene(draw, builder, big)
    count = draw.between(25, 60) if big else draw.between(4, 16)
    ops = _add_ops(draw, builder, scene, count // 2 if scene.symmetric else count)
    for number, op in enumerate(ops):
        if draw.chance(scene.wait) and number:
            _add_waits(draw, builder, scene, ops, number)
        if draw.chance(scene.gate) and op.kind != HOST:
            _add_gates(draw, builder, scene, ops, number)
    return builder.freeze()


def _add_ops(draw: Draw, builder: ProgramBuilder, scene: Scene, count: int) -> list[_Op]:
    ops: list[_Op] = []
    # Members that come later than their group's first: (operators to wait for, how to add it).
    later: list[tuple[int, _Op, int, Callable[[], int]]] = []
    groups = 0
    while len(ops) < count or later:
        due = [entry for entry in later if entry[0] <= len(ops) or len(ops) >= count]
        for entry in due:
            later.remove(entry)
            entry[1].tasks[entry[2]] = entry[3]()
        if len(ops) >= count:
            continue
        what = draw.real()
        if what < 0.1:
            zero = draw.chance(0.4)
            host = draw.between(0, scene.lanes - 1)
            unit_ps = 0 if zero else draw.pick(scene.times_ps)
            ops.append(_Op(HOST, 1, [builder.add_host(unit_ps=unit_ps, host=host)]))
        elif what < 0.55:
            ops.append(_add_blocks(draw, builder, scene))
        else:
            grouped = scene.symmetric or draw.chance(0.5)
            op, members = _draw_flow(draw, builder, scene, groups if grouped else -1)
            groups += 1
            ops.append(op)
            for place, member in enumerate(members):
                if place and draw.chance(scene.interleave):
                    later.append((len(ops) + draw.between(1, 3), op, place, member))
                else:
                    op.tasks[place] = member()
    return ops


def _demands(device: Device, plan: Sequence[tuple[int, float]], unit_ps: int) -> dict[int, float]:
    """Amounts per unit such that the task alone asks `fraction` of each capacity."""
    amounts = {}
    for kind, fraction in plan:
        capacity = device.spec.capacities[kind]
        rate = fraction * (1e12 if capacity == float("inf") else capacity)
        amounts[device.resources[kind]] = rate * unit_ps / 1e12
    return amounts


def _draw_plan(draw: Draw, device: Device) -> list[tuple[int, float]]:
    classes = range(len(device.resources))
    if not classes or draw.chance(0.15):
        return []
    return [(kind, draw.pick(_FRACTIONS)) for kind in draw.sample(classes, draw.between(1, len(classes)))]


def _draw_weight(draw: Draw, plan: Sequence[tuple[int, float]]) -> float:
    kind = draw.real()
    if kind < 0.75 or not plan:
        return 1.0
    # weight = capacity / full demand: equal bytes per second for all on that resource.
    return 1.0 / plan[0][1] if kind < 0.88 else draw.pick(_WEIGHTS)


def _add_blocks(draw: Draw, builder: ProgramBuilder, scene: Scene) -> _Op:
    devices = scene.devices if scene.symmetric else (draw.pick(scene.devices),)
    first = devices[0]
    place = draw.between(0, len(first.streams) - 1)
    units = draw.between(1, draw.pick((1, scene.max_units)))
    unit_ps = draw.pick(scene.times_ps)
    sm = first.spec.num_sms if draw.chance(0.4) else draw.between(1, first.spec.num_sms)
    quantum = 1
    if first.spec.num_sms >= 2 and draw.chance(0.2):
        quantum = draw.pick((2, 2, 3)) if first.spec.num_sms >= 3 else 2
        sm = quantum * draw.between(1, first.spec.num_sms // quantum)
    persistent = draw.chance(0.3)
    plan = _draw_plan(draw, first)
    if draw.chance(0.6):
        plan = [(kind, fraction / sm) for kind, fraction in plan]
    weight = _draw_weight(draw, plan)
    launch_ps = draw.pick(scene.times_ps) if draw.chance(scene.launch) else 0
    op = _Op(BLOCKS, units, [])
    for device in devices:
        skew = 0 if scene.symmetric and draw.chance(0.8) else draw.between(0, 1)
        task = builder.add_blocks(
            stream=device.streams[place],
            host=device.hosts[place],
            pool=device.gpu,
            units=units + skew,
            unit_ps=unit_ps,
            sm=sm,
            sm_quantum=quantum,
            persistent=persistent,
            weight=weight,
            launch_ps=launch_ps,
            demands=_demands(device, plan, unit_ps),
        )
        op.tasks.append(task)
    return op


def _draw_flow(draw: Draw, builder: ProgramBuilder, scene: Scene, group: int) -> tuple[_Op, list[Callable[[], int]]]:
    """A transfer and its members (one when alone or folded), not added yet."""
    units = draw.between(1, draw.pick((1, 3, min(8, scene.max_units))))
    unit_ps = draw.pick(scene.times_ps)
    weight = _draw_weight(draw, [(0, draw.pick(_FRACTIONS))])
    launch_ps = draw.pick(scene.times_ps) if draw.chance(scene.launch) else 0
    if scene.symmetric and group >= 0:
        place = draw.between(0, len(scene.devices[0].streams) - 1)
        homes = [(device, place) for device in scene.devices]
    else:
        every = [(device, place) for device in scene.devices for place in range(len(device.streams))]
        count = 1 if group < 0 or draw.chance(0.2) else min(len(every), draw.between(2, 4))
        homes = draw.sample(every, count)
    first = homes[0][0]
    plan = _draw_plan(draw, first)
    kind = draw.real()
    members: list[Callable[[], int]] = []
    left = {device.gpu: device.spec.num_sms for device in scene.devices}
    for device, place in homes:
        own_ps = unit_ps if draw.chance(0.7) else draw.pick(scene.times_ps)
        pool, sm = device.gpu, 0 if kind < 0.25 else draw.pick((1, 1, 1, 2, device.spec.num_sms))
        if device.copy_engines and kind > 0.75:
            pool, sm = draw.pick(device.copy_engines), 1
        # Members of one group that cannot all be resident deadlock for certain: keep that rare.
        if not draw.chance(0.01):
            sm = min(sm, left.get(pool, 1))
            left[pool] = left.get(pool, 1) - sm
        members.append(
            partial(
                builder.add_flow,
                stream=device.streams[place],
                host=device.hosts[place],
                pool=pool,
                units=units,
                unit_ps=own_ps,
                sm=min(sm, device.spec.num_sms),
                group=group,
                weight=weight,
                launch_ps=launch_ps,
                demands=_demands(device, plan, own_ps),
            )
        )
    return _Op(FLOW, units, [-1] * len(members)), members


def _lag_ps(draw: Draw, scene: Scene) -> int:
    return draw.pick(scene.times_ps) if draw.chance(0.4) else 0


def _add_waits(draw: Draw, builder: ProgramBuilder, scene: Scene, ops: Sequence[_Op], number: int) -> None:
    """Stream waits of an operator on one or two earlier ones: on the whole, or on a prefix (a wave-group signal)."""
    dst = ops[number]
    for _ in range(draw.pick((1, 1, 2))):
        src = ops[draw.between(max(0, number - 6), number - 1)]
        src_units = src.units if draw.chance(0.4) else draw.between(1, src.units)
        shift = draw.pick((0, 0, 1))
        lag_ps = _lag_ps(draw, scene)
        for place, task in enumerate(dst.tasks):
            source = src.tasks[(place + shift) % len(src.tasks)]
            if source < task:
                builder.add_edge(source, task, src_units=src_units, lag_ps=lag_ps)


def _add_gates(draw: Draw, builder: ProgramBuilder, scene: Scene, ops: Sequence[_Op], number: int) -> None:
    """One to three unit gates, rising on both sides as arrival flags do; now and then backward or onto itself."""
    dst = ops[number]
    backward = draw.chance(scene.backward)
    if backward and number + 1 < len(ops):
        src = ops[draw.between(number + 1, min(len(ops) - 1, number + 3))]
    elif dst.kind == BLOCKS and draw.chance(0.35):
        src = dst
    elif number:
        src = ops[draw.between(max(0, number - 4), number - 1)]
    else:
        return
    count = draw.between(1, min(3, src.units))
    counts = sorted(draw.between(1, src.units) for _ in range(count))
    places = sorted(draw.between(0, dst.units - 1) for _ in range(count))
    shift = 0 if src is dst else draw.pick((0, 1))
    lag_ps = _lag_ps(draw, scene)
    for src_units, dst_unit in zip(counts, places, strict=True):
        if src is dst and src_units > dst_unit:
            continue
        for place, task in enumerate(dst.tasks):
            source = src.tasks[(place + shift) % len(src.tasks)]
            builder.add_edge(source, task, src_units=src_units, dst_unit=dst_unit, lag_ps=lag_ps)
