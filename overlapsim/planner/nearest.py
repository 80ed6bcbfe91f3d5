"""Which single change makes an infeasible request feasible: more nodes, another batch, a rule less, less memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from overlapsim.errors import OverlapSimError
from overlapsim.planner.memory_screen import least_bytes
from overlapsim.planner.space import RECOMPUTES, Axes, Space, divisors, enumerate_space
from overlapsim.step.inputs import StepInputs
from overlapsim.step.simulate import step_memory, step_schedule

if TYPE_CHECKING:
    from overlapsim.planner.search import PlanRequest

Step = Callable[["PlanRequest", Space, int], StepInputs]
LEANEST: Final = 40
"""Candidates whose memory is worked out whole, those with the least bound first."""
MOST_NODES: Final = 64
"""Times as many nodes are tried at most."""
NEAR: Final = 2
"""Batches that are named below and above the one asked for."""


def nearest_changes(request: PlanRequest, step: Step) -> str:
    """Say what is nearest to a request without a plan: every single change that makes one possible.

    Parameters
    ----------
    request : infeasible as it stands
    step : makes the step of a row of a space

    Returns
    -------
    str
        ``expected one of: ...``, or that no single change was found.
    """
    found = [*_rules(request, step), *_saved(request, step), *_batches(request, step), *_nodes(request, step)]
    if not found:
        return "expected fewer rules, more nodes or a smaller model: no single change was found that makes it feasible"
    return f"expected a feasible request, such as {'; or '.join(found)}"


def least_needed(request: PlanRequest, step: Step) -> float:
    """Bytes of a GPU that the leanest candidates of a request need; infinite where there is none."""
    try:
        space = enumerate_space(
            request.model, request.cluster.num_devices, request.global_batch, request.sequence, request.axes,
            request.constraints,
        )  # fmt: skip
    except OverlapSimError:
        return float("inf")
    if not len(space):
        return float("inf")
    least = least_bytes(space, step(request, space, 0))
    best = float("inf")
    for row in np.argsort(least, kind="stable")[:LEANEST].tolist():
        if least[row] >= best:
            break
        try:
            inputs = step(request, space, row)
            best = min(best, max(entry.total_bytes for entry in step_memory(inputs, step_schedule(inputs))))
        except OverlapSimError:
            continue
    return best


def _fits(request: PlanRequest, step: Step) -> bool:
    return least_needed(request, step) <= request.limit_bytes


def _rules(request: PlanRequest, step: Step) -> Iterator[str]:
    """Constraints of which one is too much."""
    for number, rule in enumerate(request.constraints):
        others = request.constraints[:number] + request.constraints[number + 1 :]
        if _fits(replace(request, constraints=others), step):
            yield f"without {rule}"
    if not request.axes.uneven and _fits(replace(request, axes=replace(request.axes, uneven=True)), step):
        yield "with uneven stages (--uneven)"


def _saved(request: PlanRequest, step: Step) -> Iterator[str]:
    """Axes that save memory and were left out, and the memory that the leanest plan needs."""
    axes, full = request.axes, Axes()
    changes = [(f"with recompute {name}", replace(axes, recompute=(name,))) for name in reversed(RECOMPUTES[1:])]
    changes = [change for change in changes if change[1].recompute[0] not in axes.recompute][:1]
    changes += [("with ZeRO 3", replace(axes, zero=(3,)))] if 3 not in axes.zero else []
    changes += [("with any degrees", replace(axes, degrees=full.degrees))] if axes.degrees else []
    for what, changed in changes:
        if _fits(replace(request, axes=changed), step):
            yield what
    needed = least_needed(request, step)
    if request.limit_bytes < needed <= request.cluster.device.hbm_bytes:
        # Rounded up: what is named must be enough.
        yield f"--memory {math.ceil(needed / 2**30 * 10) / 10:.1f}GiB"


def _batches(request: PlanRequest, step: Step) -> Iterator[str]:
    """Batches near the one asked for that divide; only where no layout takes that one."""
    if least_needed(request, step) < float("inf"):
        return
    batch, names = request.global_batch, []
    steps = divisors(request.cluster.num_devices)
    tried = sorted({size for d in steps for size in (batch // d * d, -(-batch // d) * d)} - {0, batch})
    for side in (
        [size for size in reversed(tried) if size < batch],
        [size for size in tried if size > batch],
    ):
        found = (size for size in side if _fits(replace(request, global_batch=size), step))
        names += [size for size, _ in zip(found, range(NEAR), strict=False)]
    if names:
        yield f"a global batch of {' or '.join(str(size) for size in sorted(names))} (--global-batch)"


def _nodes(request: PlanRequest, step: Step) -> Iterator[str]:
    """The fewest nodes that are enough: one more at a time, then twice as many."""
    nodes = request.cluster.num_nodes
    counts = [*range(nodes + 1, 2 * nodes), *(nodes * 2**power for power in range(1, MOST_NODES.bit_length()))]
    for count in counts if nodes <= MOST_NODES else counts[nodes - 1 :]:
        try:
            larger = replace(request, cluster=request.cluster.with_nodes(count))
        except OverlapSimError:
            return
        if _fits(larger, step):
            yield f"{count} nodes (--nodes {count}: {larger.cluster.num_devices} GPUs)"
            return
