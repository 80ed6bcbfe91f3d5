"""What the host costs: kernel launches, CUDA graphs and stretches in which the GPU waits for the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from overlapsim.cost.base import Cost, Spread
from overlapsim.errors import UsageError
from overlapsim.hardware.profile import DeviceSpec, Source

FloatArray = NDArray[np.float64]
_TIMES: Final = ("host_s", "node_s", "start_s")


@dataclass(frozen=True)
class LaunchStack:
    """How a software stack brings kernels to the GPU.

    Attributes
    ----------
    name : of the stack
    host_s : host time from one kernel to the next: interpreter, framework, allocator and driver; 0 inside a graph
    node_s : GPU time between dependent kernels of one stream that are already queued
    start_s : from the first call to the first kernel (or of a whole graph)
    spread : central 90 % of host time over `host_s` (graphs: of `node_s`); behind slow hosts rank skew comes of it
    source : where the figures are from
    meets_each_pass : whether the hosts of a group start each pass of a layer in step and on idle GPUs, as where passes
        are profiled one by one; else they drift apart over a step. A rank without a group has no other to meet
    """

    name: str
    host_s: float
    node_s: float
    start_s: float
    spread: Spread
    source: Source
    meets_each_pass: bool = False

    def __post_init__(self) -> None:
        for field in _TIMES:
            value = getattr(self, field)
            if not (np.isfinite(value) and value >= 0):
                raise UsageError(f"{field} of launch stack {self.name!r} is {value}; expected a time >= 0")


# All of these are codes of hwprofiles/SOURCES.md. A bare launch is 4 to 6 us of CPU; what eager frameworks add to it
# (Python, autograd, allocator) is 4 to 8 times as much and must be calibrated where steps are host-bound: published
# single-node steps give 40 us a kernel for Megatron on PyTorch of 2021-22, 31 to 35 with recomputed kernels counted.
_MEGATRON: Final = LaunchStack(
    "megatron-2021", 40e-6, 1e-6, 40e-6, Spread(0.75, 1.3, "prior"), Source("derived", "LAUNCH-VTRAIN", "medium")
)
STACKS: Final[Mapping[str, LaunchStack]] = {
    stack.name: stack
    for stack in (
        LaunchStack("driver", 5e-6, 1e-6, 8e-6, Spread(0.8, 1.2, "prior"), Source("measured", "LAUNCH-CPU", "medium")),
        LaunchStack("eager", 12e-6, 1e-6, 20e-6, Spread(0.5, 2.0, "prior"), Source("prior", "LAUNCH-EAGER", "low")),
        _MEGATRON,
        replace(_MEGATRON, name="megatron-2021-profiled", meets_each_pass=True),
        LaunchStack("compiled", 6e-6, 1e-6, 20e-6, Spread(0.5, 2.0, "prior"), Source("prior", "LAUNCH-EAGER", "low")),
        LaunchStack("graph", 0.0, 1e-6, 8e-6, Spread(0.5, 2.0, "prior"), Source("prior", "LAUNCH-GRAPH", "low")),
    )
}
"""Stacks by name; ``graph`` replays a captured CUDA graph, ``...-profiled`` runs a layer's passes one by one."""
KERNELS_PER_LAYER: Final[Mapping[str, int]] = {"fwd": 26, "bwd": 47, "tp": 12}
"""Kernels of a transformer layer without fused attention, by pass, and what tensor parallelism adds to both together
(OP-BYTES)."""


def launch_stack(name: str, device: DeviceSpec | None = None) -> LaunchStack:
    """Stack by name; a device's own fit ``launch.<name>`` (by the names of its times) replaces its figures.

    Raises
    ------
    UsageError
        If the name is unknown and the device has no such fit.

    Examples
    --------
    >>> launch_stack("megatron-2021").host_s
    4e-05
    """
    base = STACKS.get(name)
    fit = None if device is None else device.fits.get(f"launch.{name}")
    if fit is not None:
        start = STACKS["eager"] if base is None else base
        low, high = fit.spread.get("host", (start.spread.low, start.spread.high))
        values = {field: fit.parameters.get(field, getattr(start, field)) for field in _TIMES}
        measured = "host" in fit.spread and fit.num_points > 0
        spread = Spread(min(low, 1.0), max(high, 1.0), "residual" if measured else "prior")
        return replace(start, name=name, **values, spread=spread, source=fit.source)
    if base is None:
        raise UsageError(f"launch stack {name!r} is unknown; expected one of {', '.join(STACKS)}")
    return base


def launch_cost(num_kernels: int, stack: LaunchStack) -> Cost:
    """Host time of launching `num_kernels` kernels (for a graph: the GPU time between them); takes no SM.

    Raises
    ------
    UsageError
        If the number is negative.

    Examples
    --------
    >>> round(launch_cost(73, launch_stack("megatron-2021")).duration_s * 1e3, 2)
    2.96
    """
    if num_kernels < 0:
        raise UsageError(f"number of kernels is {num_kernels}; expected at least 0")
    seconds = num_kernels * (stack.host_s or stack.node_s) + (stack.start_s if num_kernels else 0.0)
    return Cost(seconds, 0, "launch", stack.spread, stack.source, in_range=stack.source.layer != "prior")


def stretch_seconds(gpu_s: ArrayLike, num_kernels: ArrayLike, stack: LaunchStack) -> FloatArray:
    """Wall time of stretches of kernels on one stream that start with an empty queue.

    The host runs ahead or it does not: the longer of the kernels with the gaps between them, and of their launches.
    Forward and backward are stretches of their own, since each ends in a wait.

    Parameters
    ----------
    gpu_s : kernels alone, seconds, each stretch
    num_kernels : in each stretch
    stack : how they are launched

    Returns
    -------
    array
        ``start + max(gpu + kernels node, kernels host)``; never less than `gpu_s`.

    Raises
    ------
    UsageError
        If a time or a count is negative.

    Examples
    --------
    >>> [round(float(t) * 1e3, 2) for t in stretch_seconds([1e-3, 9e-3], 47, launch_stack("megatron-2021"))]
    [1.92, 9.09]
    """
    seconds, kernels = np.asarray(gpu_s, dtype=np.float64), np.asarray(num_kernels, dtype=np.float64)
    if not ((seconds >= 0).all() and (kernels >= 0).all()):
        raise UsageError("GPU times and numbers of kernels must be >= 0")
    start = np.where(kernels > 0, stack.start_s, 0.0)
    total: FloatArray = start + np.maximum(seconds + kernels * stack.node_s, kernels * stack.host_s)
    return total


def is_host_bound(gpu_s: float, num_kernels: int, stack: LaunchStack) -> bool:
    """Whether the GPU waits for the host in such a stretch."""
    return num_kernels * stack.host_s > gpu_s + num_kernels * stack.node_s
