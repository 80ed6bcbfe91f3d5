"""Random small machines for random programs: pools, copy engines, streams, queues and resources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.testing.draws import Draw

# Few distinct times a program: ties abound, and ties are where two engines part ways.
_PALETTES_PS = (
    (1, 2, 3),
    (10, 20, 30, 60),
    (100, 150, 200, 300, 450),
    (7, 13, 97, 101),
    (50, 100),
    (100,),
    (33333, 40000, 1000003),
    # So long that the last bit of a speed moves an end by 1 ps.
    (10**12, 3 * 10**11, 7 * 10**11),
)
_CAPACITIES = (1e12, 2e12, 5e11, 7.3e11, 3e12, 0.6)
_DERATES = (0.5, 0.8, 0.93, 1.0)


@dataclass(frozen=True)
class DeviceSpec:
    """One GPU as drawn: streams as (priority, shared queue or None, host lane), a capacity per resource class."""

    num_sms: int
    derate: float
    num_copy_engines: int
    streams: tuple[tuple[int, int | None, int], ...]
    capacities: tuple[float, ...]


@dataclass(frozen=True)
class Device:
    """One GPU as added: the numbers of its pools, streams (with their host lanes) and resources."""

    spec: DeviceSpec
    gpu: int
    copy_engines: tuple[int, ...]
    streams: tuple[int, ...]
    hosts: tuple[int, ...]
    resources: tuple[int, ...]


@dataclass(frozen=True)
class Scene:
    """The machine of one program, and how likely each feature is in it."""

    devices: tuple[Device, ...]
    symmetric: bool
    lanes: int
    times_ps: tuple[int, ...]
    max_units: int
    launch: float
    wait: float
    gate: float
    backward: float
    interleave: float


def draw_scene(draw: Draw, builder: ProgramBuilder, big: bool) -> Scene:
    """Add one to three devices to `builder`, all alike (symmetric) or each its own; `big` allows many units."""
    symmetric = draw.chance(0.3)
    contended = draw.chance(0.75)
    lanes = draw.pick((1, 1, 2, 3))
    # A shared class is one resource for all devices (a spine), any other is one each (HBM, a port).
    shared = [draw.chance(0.3) for _ in range(draw.pick((0, 1, 1, 2, 2, 3)))]
    priorities = draw.pick(((0,), (0, 5), (0, 0, 1, 5), (-1, 0, 2)))
    share_queue = draw.pick((0.0, 0.0, 0.4, 0.8))
    num_devices = draw.between(2, 3) if symmetric else draw.between(1, 3)
    devices: list[Device] = []
    spec = _draw_device(draw, len(shared), priorities, share_queue, lanes, contended)
    for number in range(num_devices):
        if number and not symmetric:
            spec = _draw_device(draw, len(shared), priorities, share_queue, lanes, contended)
        devices.append(_add_device(builder, spec, shared, lanes, devices[0] if devices else None, number))
    gated = draw.chance(0.5)
    return Scene(
        devices=tuple(devices),
        symmetric=symmetric,
        lanes=lanes,
        times_ps=draw.pick(_PALETTES_PS),
        max_units=150 if big else draw.pick((3, 8, 20)),
        launch=draw.pick((0.0, 0.2, 0.6)),
        wait=draw.pick((0.1, 0.4, 0.7)),
        gate=draw.pick((0.1, 0.25, 0.4)) if gated else 0.0,
        backward=draw.pick((0.0, 0.0, 0.15)),
        interleave=draw.pick((0.0, 0.0, 0.3)),
    )


def _draw_device(
    draw: Draw, num_classes: int, priorities: Sequence[int], share_queue: float, lanes: int, contended: bool
) -> DeviceSpec:
    streams: list[tuple[int, int | None, int]] = []
    for _ in range(draw.between(2, 5)):
        queue = draw.between(0, 1) if draw.chance(share_queue) else None
        # All tasks of a queue have one host, so a shared queue fixes it.
        host = draw.between(0, lanes - 1) if queue is None else queue
        streams.append((draw.pick(priorities), queue, host))
    return DeviceSpec(
        num_sms=draw.pick((1, 2, 2, 3, 4, 4, 5, 8)),
        derate=draw.pick(_DERATES) if contended and draw.chance(0.6) else 1.0,
        num_copy_engines=draw.pick((0, 0, 1, 2)),
        streams=tuple(streams),
        capacities=tuple(
            draw.pick(_CAPACITIES) if contended and draw.chance(0.85) else float("inf") for _ in range(num_classes)
        ),
    )


def _add_device(
    builder: ProgramBuilder,
    spec: DeviceSpec,
    shared: Sequence[bool],
    lanes: int,
    first: Device | None,
    number: int,
) -> Device:
    """Add a device whose shared resource classes are those of the `first` one."""
    if first is not None:
        capacities = tuple(
            first.spec.capacities[kind] if common else spec.capacities[kind] for kind, common in enumerate(shared)
        )
        spec = replace(spec, capacities=capacities)
    return Device(
        spec=spec,
        gpu=builder.add_pool(spec.num_sms, derate=spec.derate, device=number),
        copy_engines=tuple(builder.add_pool(1, device=number) for _ in range(spec.num_copy_engines)),
        streams=tuple(
            builder.add_stream(priority=priority, queue=None if queue is None else 10 * number + queue)
            for priority, queue, _ in spec.streams
        ),
        hosts=tuple((host + number) % lanes for _, _, host in spec.streams),
        resources=tuple(
            first.resources[kind] if first is not None and common else builder.add_resource(spec.capacities[kind])
            for kind, common in enumerate(shared)
        ),
    )
