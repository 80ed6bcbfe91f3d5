"""What a step's prediction stands on that was not measured, and what it leaves out, as findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from overlapsim.cost.base import Cost
from overlapsim.cost.beliefs import machine_findings
from overlapsim.cost.launch import launch_stack
from overlapsim.cost.prices import PriceBook
from overlapsim.plan import Finding
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import graph_builder
from overlapsim.step.routed import routing_findings
from overlapsim.step.traffic import embedding_reduction, stage_traffic
from overlapsim.units import format_time
from overlapsim.workload.build import Which
from overlapsim.workload.memory import Memory
from overlapsim.workload.operators import CollectiveOp, GemmOp, Operator

KERNELS: Final = ("gemm", "attention", "memory")
LITTLE: Final = 0.05
"""Share of a family's time that may be believed without a word."""
WITHOUT_FLASH: Final = ("volta", "turing")
"""Architectures that the published flash attention kernels do not run on (FlashAttention-2: Ampere and later)."""
_WORDS: Final = {"gemm": "GEMMs", "attention": "attention", "memory": "memory-bound kernels"}


def step_findings(inputs: StepInputs, prices: PriceBook, memory: Sequence[Memory]) -> tuple[Finding, ...]:
    """Everything that was believed and not measured in a step, the loudest first.

    Codes: ``device_not_calibrated`` (no kernel of the step was measured on such a GPU), ``prices_assumed`` (by kind of
    kernel, the share of time priced by priors), ``groups_not_calibrated``, those of `machine_findings`,
    ``launch_assumed``, ``clock_assumed``, ``one_queue_serialises``, ``attention_kernel_missing``, ``devices_idle``,
    those of `routing_findings` and those of `Memory`.
    """
    operators = list(_operators(inputs))
    found = list(_of_kernels(inputs, prices, operators))
    found += _of_groups(prices, _collectives(inputs, operators))
    # A step has no single GEMM to measure: kernels are spoken of by kind above.
    found += [f for f in _of_machine(prices) if not _said(f, found)]
    found += _of_settings(inputs)
    found += max(memory, key=lambda entry: entry.total_bytes).findings
    return tuple(dict.fromkeys(found))


def _of_machine(prices: PriceBook) -> list[Finding]:
    key = ("findings", True)
    if key not in prices.models:
        prices.models[key] = machine_findings(prices.cluster, gemm_measured=True)
    return list(prices.models[key])


def _said(finding: Finding, found: Iterable[Finding]) -> bool:
    """A GPU that was never measured says more than a profile that is not of the user's machine."""
    return finding.code == "profile_not_calibrated" and any(f.code == "device_not_calibrated" for f in found)


def _operators(inputs: StepInputs) -> Iterator[tuple[Operator, int]]:
    """Operators of one micro-batch through the model, and how often each runs."""
    builder = graph_builder(inputs)
    passes: tuple[Which, ...] = ("forward", "backward")
    for layer, times in inputs.model.kinds.items():
        for which in passes:
            yield from ((op, times) for op in builder.layer(layer, which).operators)
    for which in passes:
        for graph in (builder.embedding(which), builder.head(which)):
            yield from ((op, 1) for op in graph.operators)


def _collectives(inputs: StepInputs, operators: Iterable[tuple[Operator, int]]) -> Iterator[CollectiveOp]:
    yield from (op for op, _ in operators if isinstance(op, CollectiveOp))
    # Where layers gather their own parameters the groups are those of a step that gathers them at once.
    whole = replace(inputs, reshard=False)
    for device in {0, inputs.layout.pp - 1}:
        traffic = stage_traffic(whole, device)
        yield from (op for op, _ in traffic.reduce)
        yield from (op for op, _ in traffic.gather)
    if (shared := embedding_reduction(inputs)) is not None:
        yield shared
    if inputs.layout.pp > 1:
        yield CollectiveOp("send_recv", 1e6, inputs.layout.pp, inputs.model.dtype, "embed", group="pp")


def _of_kernels(inputs: StepInputs, prices: PriceBook, operators: Sequence[tuple[Operator, int]]) -> Iterator[Finding]:
    whole: dict[str, float] = defaultdict(float)
    believed: dict[str, float] = defaultdict(float)
    sources: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    costs: dict[Operator, Cost] = {}
    for op, times in operators:
        if isinstance(op, CollectiveOp):
            continue
        if op not in costs:
            costs[op] = prices.vendor_gemm(op) if isinstance(op, GemmOp) else prices.kernel(op)
        cost = costs[op]
        whole[cost.family] += times * cost.duration_s
        if cost.spread.origin == "prior":
            believed[cost.family] += times * cost.duration_s
            sources[cost.family][cost.source.reference] += times * cost.duration_s
    device = inputs.cluster.device.name
    if whole and all(believed[family] >= whole[family] for family in whole):
        yield Finding(
            "device_not_calibrated",
            f"NOT CALIBRATED: no kernel of this step was measured on {device}; all are priced by its data sheet, by "
            "constants of other GPUs and by priors, so the step may be tens of percent off: measure GEMMs, attention "
            "and norms there and run `overlapsim calibrate`",
        )
    for family in KERNELS:
        if believed[family] > LITTLE * whole[family]:
            largest = max(sources[family], key=lambda name: sources[family][name])
            yield Finding(
                "prices_assumed",
                f"{believed[family] / whole[family]:.0%} of the time of {_WORDS[family]} is priced without a "
                f"measurement of {device} or of such shapes (mostly {largest}); ranges are wider",
            )


def _of_groups(prices: PriceBook, collectives: Iterable[CollectiveOp]) -> Iterator[Finding]:
    """Groups of ranks whose collectives no table and no fit of this machine prices."""
    found: dict[str, list[str]] = {}
    for op in dict.fromkeys((o.kind, o.ranks, o.group, o.route) for o in collectives):
        kind, ranks, group, route = op
        asked = CollectiveOp(kind, 2.0**24, ranks, group=group, route=route)
        yield from prices.route_findings(asked)
        cost = prices.collective(asked)
        if cost.spread.origin == "prior" and ranks > 1:
            place = prices.groups.get(group)
            nodes = "" if place is None or place.nodes == 1 else f" on {place.nodes} nodes"
            found.setdefault(f"{group or 'ranks'} ({ranks} ranks{nodes})", []).append(kind)
    if found:
        text = "; ".join(f"{group}: {', '.join(dict.fromkeys(kinds))}" for group, kinds in found.items())
        yield Finding(
            "groups_not_calibrated",
            f"collectives of these groups have no measurement on {prices.cluster.name}: {text}; they are priced by "
            "latency, wire bytes and NIC rate: measure them with nccl-tests and calibrate",
        )


def _of_settings(inputs: StepInputs) -> Iterator[Finding]:
    stack = launch_stack(inputs.stack, inputs.cluster.device)
    if not stack.host_s:
        start, gap = format_time(stack.start_s), format_time(stack.node_s)
        message = (
            f"no host time a kernel (a CUDA graph: {start} to start one, {gap} between kernels); "
            "eager frameworks take 5 to 40 us a kernel: name yours"
        )
        yield Finding("launch_assumed", f"launch stack {inputs.stack!r}: {message}")
    elif stack.spread.origin == "prior":
        message = f"{format_time(stack.host_s)} of host time a kernel, a prior ({stack.source.reference})"
        yield Finding("launch_assumed", f"launch stack {inputs.stack!r}: {message}; calibrate it where steps are short")
    if inputs.sustained_clock == 1:
        yield Finding(
            "clock_assumed",
            "GEMMs run as in short benchmarks; under a power limit a long run holds a lower clock (published H100 runs "
            "about 0.8 of it): give the sustained share",
        )
    yield from routing_findings(inputs)
    one_queue = inputs.composition.setting.num_queues == 1
    if one_queue and inputs.dp_overlap != "none" and inputs.layout.tp == inputs.layout.cp == 1:
        yield Finding(
            "one_queue_serialises",
            "one hardware queue with tp=1 and cp=1: what data parallelism sends runs beside one kernel only, and "
            "kernels wait behind it; leave CUDA_DEVICE_MAX_CONNECTIONS unset",
        )
    architecture = inputs.cluster.device.architecture
    if inputs.recipe.attention == "flash" and architecture in WITHOUT_FLASH:
        yield Finding(
            "attention_kernel_missing",
            f"the recipe has fused (flash) attention, which has no published kernel for {architecture}; a recipe with "
            "unfused attention says what runs there",
        )
    idle = inputs.cluster.num_devices - inputs.layout.world_size
    if idle:
        yield Finding("devices_idle", f"{idle} of {inputs.cluster.num_devices} GPUs are not in the layout")
