"""`simulate_forward`: a serving step (prefill, chunk, decode, or both in one) -> time, where it goes, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from overlapsim.cost.launch import STACKS, LaunchStack, launch_stack
from overlapsim.cost.prices import PriceBook
from overlapsim.errors import LayoutError, StrategyError, UsageError
from overlapsim.hardware.profile import Cluster
from overlapsim.plan import Finding
from overlapsim.step.blocks import Piece, simulate_piece
from overlapsim.step.categories import KINDS
from overlapsim.step.machine import machine_prices
from overlapsim.step.piece_setting import setting_of
from overlapsim.step.routed import dispatch_findings
from overlapsim.step.simulate import ENDS, FAMILIES
from overlapsim.strategy.base import Context
from overlapsim.strategy.chains import is_gemm
from overlapsim.strategy.compatibility import check_compatible
from overlapsim.strategy.compose import Composition
from overlapsim.units import dtype_bytes, format_bytes
from overlapsim.workload.dispatch_buffers import dispatch_buffer_bytes
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job, check_layout
from overlapsim.workload.memory import CONTEXT_BYTES
from overlapsim.workload.model import Layer, ModelSpec, MoE
from overlapsim.workload.operators import CollectiveOp, OperatorGraph
from overlapsim.workload.rank_map import ORDER, RankMap
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.routing import UNIFORM, Routing
from overlapsim.workload.serving import ForwardBatch, ServingGraphs, kv_cache_bytes
from overlapsim.workload.stage_weights import stage_parameters
from overlapsim.workload.stages import chunk_layers


@dataclass(frozen=True)
class ForwardInputs:
    """One serving step.

    Attributes
    ----------
    model, cluster, layout : what is served, on which machine, and how it is split; sequences are not split
    batch : what each data-parallel replica computes
    recipe : which kernels run; ``fp8`` for weights and activations of GEMMs in fp8
    kv_dtype : of the cache; empty: the model's
    stack : how kernels are launched (`cost.launch`)
    imbalance : rows of the fullest expert rank over the even share
    routing : how tokens spread over experts, instead of `imbalance`
    rank_order : order in which degrees fill the ranks
    sustained_clock : clock of a long run over that of a short benchmark, in (0, 1]
    composition : overlap strategies by operator
    contention : False leaves HBM and link sharing out

    Tensor-parallel ranks sum whole activations, as serving frameworks do; only where experts are dealt to ranks as well
    (``ep``) does the layout's ``sequence_parallel`` apply.

    Raises
    ------
    LayoutError
        If the model cannot run in the layout, or the layout does not fit the machine.
    WorkloadError
        If such a model, recipe or layout cannot be served (`workload.serving.ServingGraphs`).
    UsageError
        If the launch stack or the cache's type is unknown, or the clock is out of range.
    """

    model: ModelSpec
    cluster: Cluster
    layout: Layout
    batch: ForwardBatch
    recipe: Recipe = field(default_factory=Recipe)
    kv_dtype: str = ""
    stack: str = "graph"
    imbalance: float = 1.0
    routing: Routing = UNIFORM
    rank_order: tuple[str, ...] = ORDER
    sustained_clock: float = 1.0
    composition: Composition = field(default_factory=Composition)
    contention: bool = True

    def __post_init__(self) -> None:
        if self.layout.ep == 1:
            object.__setattr__(self, "layout", replace(self.layout, sequence_parallel=self.layout.tp == 1))
        _ = self.graphs
        # Rows are padded to the ranks that split them, so no number of tokens is refused.
        check_layout(self.layout, self.model, Job(self.layout.sequence_split))
        if self.layout.world_size > self.cluster.num_devices:
            raise LayoutError(
                f"{self.layout} has {self.layout.world_size} ranks and {self.cluster.name} with "
                f"{self.cluster.num_nodes} node(s) has {self.cluster.num_devices} GPUs; expected a smaller layout, or "
                "more nodes"
            )
        if self.layout.vpp > 1:
            raise LayoutError(f"vpp is {self.layout.vpp} in a serving step; expected 1: there is nothing to interleave")
        if self.stack not in STACKS and f"launch.{self.stack}" not in self.cluster.device.fits:
            raise UsageError(f"launch stack {self.stack!r} is unknown; expected one of {', '.join(STACKS)}")
        if not 0 < self.sustained_clock <= 1:
            raise UsageError(f"sustained_clock is {self.sustained_clock}; expected a share in (0, 1]")
        dtype_bytes(self.kv_dtype or self.model.dtype)

    @cached_property
    def graphs(self) -> ServingGraphs:
        """Maker of the layers' operator graphs."""
        return ServingGraphs(
            self.model, self.layout, self.recipe, self.batch, self.kv_dtype, self.imbalance, self.routing
        )

    @property
    def gemms(self) -> set[tuple[str, str]]:
        """(Operator, pass) of every GEMM of the layers and the head."""
        graphs = [*(self.graphs.layer(layer) for layer in self.model.kinds), self.graphs.head()]
        return {(op.name, op.pass_) for graph in graphs for op in graph.operators if is_gemm(op)}


@dataclass(frozen=True)
class ForwardMemory:
    """Bytes of one GPU of the fullest stage.

    Attributes
    ----------
    parameters : of its layers
    kv_cache : of the sequences in the step, after it
    context : a prior for the CUDA context, kernels and communicators, and buffers of kernels for experts
    """

    parameters: float
    kv_cache: float
    context: float = CONTEXT_BYTES

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return self.parameters + self.kv_cache + self.context


@dataclass(frozen=True, eq=False)
class ForwardResult:
    """The answer for one serving step.

    Attributes
    ----------
    inputs : what was asked
    time_s, low_s, high_s : from the first stage's start to the last one's end, and central 90 % interval
    breakdown_s : seconds of each kind (`categories.KINDS`); their sum is `time_s`
    tokens_per_s : tokens computed by all replicas a second, with as many steps under way as there are stages
    memory : of the fullest GPU
    cache_tokens : tokens of cache that the fullest GPU has room for beside weights, all sequences together
    findings : what was believed and not measured
    """

    inputs: ForwardInputs
    time_s: float
    low_s: float
    high_s: float
    breakdown_s: Mapping[str, float]
    tokens_per_s: float
    memory: ForwardMemory
    cache_tokens: float
    findings: tuple[Finding, ...] = ()


def simulate_forward(inputs: ForwardInputs, *, ranges: bool = True) -> ForwardResult:
    """Predict one serving step.

    Parameters
    ----------
    inputs : the question
    ranges : False leaves 90 % intervals out

    Examples
    --------
    >>> from overlapsim.hardware.loading import load_cluster
    >>> from overlapsim.workload.presets import load_model
    >>> model, cluster = load_model("llama3-8b")[0], load_cluster("h100-sxm8")
    >>> one = ForwardInputs(model, cluster, Layout(), ForwardBatch.decode(1, 1024))
    >>> many = ForwardInputs(model, cluster, Layout(), ForwardBatch.decode(32, 1024))
    >>> ratio = simulate_forward(many).time_s / simulate_forward(one).time_s
    >>> 1 < ratio < 2
    True
    """
    prices = machine_prices(
        inputs.cluster, inputs.layout, rank_order=inputs.rank_order, sustained_clock=inputs.sustained_clock
    )
    if inputs.composition.arranging:
        _check_used(inputs, prices)
    stages, between = _forward(inputs, prices)
    whole = sum(stages, start=between)
    seconds, low, high = whole.duration_s, 0.0, 0.0
    for family in FAMILIES if ranges else ():
        for end in ENDS:
            moved, gaps = _forward(inputs, prices.at(family, end))
            shifted = sum(moved, start=gaps).duration_s - seconds
            low, high = low + min(0.0, shifted) ** 2, high + max(0.0, shifted) ** 2
    memory = max((_memory(inputs, stage) for stage in range(inputs.layout.pp)), key=lambda entry: entry.total_bytes)
    # In the steady state a stage takes a batch as often as the slowest one, with its transfer, is done.
    period_s = max(stage.duration_s for stage in stages) + between.duration_s / max(1, inputs.layout.pp - 1)
    room = inputs.cluster.device.hbm_bytes - memory.parameters - memory.context
    cached = sum(segment.sequences * (segment.past + segment.new) for segment in inputs.batch.segments)
    return ForwardResult(
        inputs,
        seconds,
        max(0.0, seconds - low**0.5),
        seconds + high**0.5,
        {kind: whole.kinds_s.get(kind, 0.0) for kind in KINDS},
        inputs.batch.tokens * inputs.layout.dp / period_s,
        memory,
        max(0.0, room) * cached / memory.kv_cache if memory.kv_cache else float("inf"),
        tuple(
            dict.fromkeys((*_findings(inputs, memory), *_of_experts(inputs, prices), *prices.findings, *whole.findings))
        ),
    )


def _forward(inputs: ForwardInputs, prices: PriceBook) -> tuple[list[Piece], Piece]:
    """Each stage, and the transfers between them."""
    stack, end = launch_stack(inputs.stack, inputs.cluster.device), prices.ends.get("launch")
    factor = getattr(stack.spread, end) if end else 1.0
    host_s = stack.host_s * factor
    kinds: dict[Layer, Piece] = {}
    graphs, layers = inputs.graphs, inputs.model.layers
    counts = chunk_layers(inputs.layout, inputs.model.num_layers)
    stages, done = [], 0
    for stage, count in enumerate(counts):
        total = Piece()
        for layer in layers[done : done + count]:
            if layer not in kinds:
                kinds[layer] = _simulate(inputs, prices, graphs.layer(layer), stack, host_s)
            total += kinds[layer]
        if stage == 0:
            total += _simulate(inputs, prices, graphs.embedding(), stack, host_s)
            total += Piece(stack.start_s, {"host": stack.start_s})
        if stage == len(counts) - 1:
            total += _simulate(inputs, prices, graphs.head(), stack, host_s)
        stages.append(total)
        done += count
    return stages, sum(_transfers(inputs, prices), start=Piece())


def _simulate(
    inputs: ForwardInputs, prices: PriceBook, graph: OperatorGraph, stack: LaunchStack, host_s: float
) -> Piece:
    context, chosen = Context(graph, prices), inputs.composition
    gemms = {(op.name, op.pass_) for op in graph.operators if is_gemm(op)}
    pairs = {where: what for where, what in chosen.pairs.items() if where in gemms}
    asked = replace(context, prices=prices.nominal)
    arranging = tuple(entry for entry in chosen.arranging if entry.strategy.applies_to(asked).applies)
    return simulate_piece(
        context,
        replace(chosen, pairs=pairs, arranging=arranging),
        launch_s=host_s,
        hosts=stack,
        contention=inputs.contention,
    )


def _check_used(inputs: ForwardInputs, prices: PriceBook) -> None:
    """Refuse strategies for whole graphs that the rules on layout and dispatcher, or every layer, refuse."""
    architecture = inputs.cluster.device.architecture
    setting = replace(setting_of(inputs.composition, inputs.layout, inputs.recipe), architecture=architecture)
    if reasons := check_compatible(inputs.composition.strategies, setting):
        raise StrategyError(f"these strategies do not go together: {'; '.join(reasons)}")
    for entry in inputs.composition.arranging:
        contexts = (Context(inputs.graphs.layer(layer), prices) for layer in inputs.model.kinds)
        answers = [entry.strategy.applies_to(context) for context in contexts]
        if not any(answer.applies for answer in answers):
            why = "; ".join(dict.fromkeys(reason for answer in answers for reason in answer.reasons))
            raise StrategyError(f"{entry.strategy.name} is switched on for the step and no layer takes it: {why}")


def _transfers(inputs: ForwardInputs, prices: PriceBook) -> Iterator[Piece]:
    """Hidden activations from each stage to the next; every tensor-parallel rank has its own copy, or its part."""
    layout, model = inputs.layout, inputs.model
    split = layout.tp if layout.sequence_parallel else 1
    size = inputs.batch.tokens * model.hidden * dtype_bytes(model.dtype) / split
    line, per_node = RankMap(layout, inputs.rank_order).group("pp"), inputs.cluster.node.num_devices
    for source, target in pairwise(line):
        inside = source // per_node == target // per_node
        ranks, group = (2, "pair") if inside else (layout.pp, "pp")
        seconds, _ = prices.flow(CollectiveOp("send_recv", size, ranks, model.dtype, "embed", group=group))
        yield Piece(seconds, {"exposed_pp": seconds})


def _memory(inputs: ForwardInputs, stage: int) -> ForwardMemory:
    model, layout = inputs.model, inputs.layout
    counts = chunk_layers(layout, model.num_layers)
    first = sum(counts[:stage])
    # Multi-token prediction is for training.
    local = stage_parameters(replace(model, num_mtp_layers=0), layout, stage)
    width = dtype_bytes("fp8" if inputs.recipe.fp8 else model.dtype)
    cache = kv_cache_bytes(inputs.graphs, model.layers[first : first + counts[stage]])
    tokens = -(-inputs.batch.tokens // layout.sequence_split)
    buffers = dispatch_buffer_bytes(model, layout, inputs.recipe, tokens)
    return ForwardMemory(float(local.total * width), cache, CONTEXT_BYTES + buffers)


def _of_experts(inputs: ForwardInputs, prices: PriceBook) -> Iterator[Finding]:
    """What is believed of the kernels that route tokens, and what of routing changes results or is uneven."""
    for layer in inputs.model.kinds:
        for op in inputs.graphs.layer(layer).of_type(CollectiveOp):
            yield from prices.route_findings(op)
    yield from dispatch_findings(inputs)
    experts = any(isinstance(layer.mlp, MoE) for layer in inputs.model.kinds)
    if experts and inputs.recipe.dispatch.dtype and inputs.layout.ep > 1:
        message = f"tokens go to their experts in {inputs.recipe.dispatch.dtype}: this changes results"
        yield Finding("accuracy_affecting", message)
    if not inputs.routing.even and experts:
        message = f"tokens go to experts by {inputs.routing.kind}: the fullest rank sets the pace of every layer"
        yield Finding("routing_skewed", message)
    elif not inputs.routing.even:
        yield Finding("imbalance_not_applied", f"routing={inputs.routing} of experts: {inputs.model.name} has none")


def _findings(inputs: ForwardInputs, memory: ForwardMemory) -> Iterator[Finding]:
    capacity = inputs.cluster.device.hbm_bytes
    if memory.total_bytes > capacity:
        yield Finding(
            "memory_exceeded",
            f"weights take {format_bytes(memory.parameters)}, the cache of this step {format_bytes(memory.kv_cache)}; "
            f"{inputs.cluster.device.name} has {format_bytes(capacity)}: fewer sequences, more tp or pp, or fp8",
        )
    if inputs.batch.phase == "mixed":
        yield Finding(
            "attention_fused",
            "prompts and decodes run as one call an operator; attention is priced as one launch with the work of both",
        )
    yield Finding("sampling_left_out", "sampling, scheduling and detokenisation are not in the time of a step")
