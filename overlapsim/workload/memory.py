"""Memory of one GPU by kind: states of its parameters, activations in flight, logits, buffers, and an allowance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Final

from overlapsim.errors import WorkloadError
from overlapsim.plan import Finding
from overlapsim.units import dtype_bytes, format_bytes
from overlapsim.workload.activations import MODERN, layer_activations
from overlapsim.workload.build_part import Tokens
from overlapsim.workload.dispatch_buffers import dispatch_buffer_bytes
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.model import Layer, ModelSpec
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.recompute import Activation, Recompute
from overlapsim.workload.stage_weights import LocalParameters, layer_parameters_local, stage_parameters
from overlapsim.workload.stages import stage_layers
from overlapsim.workload.state_precision import StatePrecision, recipe_precision
from overlapsim.workload.vocabulary import VOCABULARY_MULTIPLE, padded_vocabulary

CONTEXT_BYTES: Final = 1.0e9
"""Prior: CUDA context, kernels and communicators. The least that MegaScale-MoE's figure 17 shows beside states and
activations (1.0 to 3.4 GB)."""
FRAGMENTATION: Final = 0.05
"""Prior: bytes that the allocator holds beyond those in use, over activations, logits and workspace."""
UNITS_GATHERED: Final = 2
"""Layers whose parameters ZeRO-3 holds whole at a time: the one at work and the next."""
NO_RECOMPUTE: Final = Recompute()
# What a stage receives: activations forward, gradients backward.
_BOUNDARIES: Final = 2
# A softmax over the vocabulary in fp32 stays until the backward pass where the loss is a chain of kernels.
_CHAIN_LOGIT_BYTES: Final = 4


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one GPU by kind.

    Attributes
    ----------
    parameters, gradients, optimizer : states, as ZeRO leaves them
    activations : kept for micro-batches in flight
    logits : last norm and logits of the micro-batch whose loss is computed
    buffers : rebuilt tensors and gradients of the layer at work, gathered inputs, transfers between stages, what
        ZeRO gathers or has not yet scattered, and those of kernels for experts
    allowance : a prior for the context and the allocator
    findings : what of this is believed and not measured
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    allowance: float
    findings: tuple[Finding, ...] = ()

    @property
    def total_bytes(self) -> float:
        """Bytes of all kinds."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, float]:
        """Bytes by kind, in the order of the fields."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "findings"}


@dataclass(frozen=True)
class MemoryModel:
    """What memory depends on besides layout and stage.

    Attributes
    ----------
    model, job : the model; sequence, micro-batch and layers of stages
    recipe : kernels, which keep more or less
    recompute : what is rebuilt
    precision : bytes of states; None: mixed precision of the model's dtype, gradients in fp32
    imbalance : tokens of the fullest expert rank over the even share
    fragmentation, context_bytes : priors of the allowance
    vocabulary_multiple : rows for each tensor-parallel rank to which the vocabulary is padded
    """

    model: ModelSpec
    job: Job
    recipe: Recipe = MODERN
    recompute: Recompute = NO_RECOMPUTE
    precision: StatePrecision | None = None
    imbalance: float = 1.0
    fragmentation: float = FRAGMENTATION
    context_bytes: float = CONTEXT_BYTES
    vocabulary_multiple: int = VOCABULARY_MULTIPLE

    def stage(self, layout: Layout, stage: int, in_flight: Sequence[float]) -> Memory:
        """Peak memory of a GPU of a pipeline stage.

        Parameters
        ----------
        stage : int
            Pipeline stage, from 0.
        in_flight : sequence of float
            For each model chunk of the stage, micro-batches whose activations are kept at once, as the schedule has
            it: ``(pp - stage,)`` for 1F1B, ``(number of micro-batches,)`` for GPipe.

        Raises
        ------
        LayoutError
            If there is no such stage, or layers or heads do not divide.
        WorkloadError
            If `in_flight` is not one number of at least 0 for each chunk.
        """
        if len(in_flight) != layout.vpp or not all(0 <= count < float("inf") for count in in_flight):
            raise WorkloadError(
                f"in_flight is {list(in_flight)} with {layout.vpp} chunks a stage; "
                "expected one number of at least 0 for each"
            )
        chunks = self.chunk_tensors(layout, stage)
        held = sum(count * self.recompute.kept_bytes(tensors) for count, tensors in zip(in_flight, chunks, strict=True))
        if stage == 0 and self.recipe.dropout:
            held += in_flight[0] * self._boundary_elements(layout)
        logits = self._logits(layout) if stage == layout.pp - 1 else 0.0
        working = self._working(layout, stage, chunks)
        local = Tokens.of(layout, self.job.micro_batch, self.job.seq_len).local
        dispatch = dispatch_buffer_bytes(self.model, layout, self.recipe, local)
        states, zero_buffers = self._states(layout, stage)
        allowance = self.context_bytes + self.fragmentation * (held + logits + working)
        return Memory(
            *states,
            held,
            logits,
            working + zero_buffers + dispatch,
            allowance,
            (*self._allowed(allowance), *self._whole(layout)),
        )

    def together(self, parts: Iterable[Memory]) -> Memory:
        """Several copies of a model on one GPU: states and activations add up, what is at work is there once."""
        each = tuple(parts)
        if len(each) == 1:
            return each[0]
        allowance = self.context_bytes + sum(part.allowance - self.context_bytes for part in each)
        whole = tuple(f for f in each[0].findings if f.code != "memory_allowance_assumed")
        return Memory(
            parameters=sum(part.parameters for part in each),
            gradients=sum(part.gradients for part in each),
            optimizer=sum(part.optimizer for part in each),
            activations=sum(part.activations for part in each),
            logits=max(part.logits for part in each),
            buffers=max(part.buffers for part in each),
            allowance=allowance,
            findings=(*self._allowed(allowance), *whole),
        )

    def chunk_tensors(self, layout: Layout, stage: int) -> tuple[tuple[tuple[Activation, ...], ...], ...]:
        """Tensors of each layer of each chunk of a stage; multi-token prediction counts to the last chunk."""
        kinds: dict[int, tuple[Activation, ...]] = {}

        def tensors(layer: Layer) -> tuple[Activation, ...]:
            if id(layer) not in kinds:
                seq_len, micro_batch = self.job.seq_len, self.job.micro_batch
                kinds[id(layer)] = layer_activations(
                    self.model, layer, layout, seq_len, micro_batch, self.recipe, self.imbalance
                )
            return kinds[id(layer)]

        chunks = [
            tuple(map(tensors, chunk)) for chunk in stage_layers(self.model, layout, stage, self.job.stage_layers)
        ]
        if stage == layout.pp - 1:
            chunks[-1] += (tensors(self.model.layers[-1]),) * self.model.num_mtp_layers
        return tuple(chunks)

    def _boundary_elements(self, layout: Layout) -> float:
        return self.job.seq_len * self.job.micro_batch / layout.sequence_split * self.model.hidden

    def _logit_elements(self, layout: Layout) -> float:
        if not self.model.vocabulary:
            return 0.0
        columns = padded_vocabulary(self.model.vocabulary, layout.tp, self.vocabulary_multiple) / layout.tp
        return self.job.seq_len * self.job.micro_batch / layout.context * columns * (1 + self.model.num_mtp_layers)

    def _logits(self, layout: Layout) -> float:
        """Input and output of the last norm, and the logits that the backward pass reads."""
        own = dtype_bytes(self.model.dtype)
        width = _CHAIN_LOGIT_BYTES if self.recipe.loss == "chain" else own
        norms = 2 * self._boundary_elements(layout) * own * (1 + self.model.num_mtp_layers)
        return norms + self._logit_elements(layout) * width

    def _working(self, layout: Layout, stage: int, chunks: Sequence[Sequence[Sequence[Activation]]]) -> float:
        """Bytes alive beside kept ones while one layer, or the loss, is at work."""
        own = dtype_bytes(self.model.dtype)
        rebuilt = max((self.recompute.rebuilt_bytes(layers) for layers in chunks), default=0.0)
        largest = max((tensor.size_bytes for chunk in chunks for layer in chunk for tensor in layer), default=0.0)
        # A tensor's gradient, and that of the operator before it.
        layer_work = rebuilt + 2 * largest
        loss_work = (
            self._logit_elements(layout) * own if stage == layout.pp - 1 and self.recipe.loss == "chain" else 0.0
        )
        boundary = self._boundary_elements(layout) * own
        gathered = boundary * layout.tp if layout.tp > 1 and layout.sequence_parallel else 0.0
        if "tp-fp8" in self.recipe.compress:
            # Narrow copies of what is sent, and of what arrives.
            gathered += 2 * gathered * dtype_bytes("fp8") / own
        return max(layer_work, loss_work) + gathered + (_BOUNDARIES * boundary if layout.pp > 1 else 0.0)

    def _states(self, layout: Layout, stage: int) -> tuple[tuple[float, float, float], float]:
        """Parameters, gradients and optimizer state, and the buffers of ZeRO."""
        width = self.precision or recipe_precision(self.model.dtype, self.recipe)
        local = stage_parameters(
            self.model, layout, stage, self.job.stage_layers, self.vocabulary_multiple, whole_shared=self._whole_shared
        )
        sharded = local.dense / layout.dense_shards + local.expert / layout.expert_shards
        whole: float = local.total
        parameters = width.parameter_bytes * (sharded if layout.zero >= 3 else whole)
        scattered = layout.zero >= 3 or (layout.zero == 2 and not self._accumulates(layout))
        gradients = width.gradient_bytes * (sharded if scattered else whole)
        optimizer = width.optimizer_bytes * (sharded if layout.zero >= 1 else whole)
        # Layers at work are whole: gathered to compute, and their gradients until they are scattered. A rank's own
        # shard of them is counted once.
        unit = self._units(layout, stage)
        beyond = unit.dense * (1 - 1 / layout.dense_shards) + unit.expert * (1 - 1 / layout.expert_shards)
        open_bytes = (width.parameter_bytes if layout.zero >= 3 else 0) + (width.gradient_bytes if scattered else 0)
        return (parameters, gradients, optimizer), open_bytes * beyond

    @property
    def _whole_shared(self) -> bool:
        return self.recipe.shared == "whole"

    def _accumulates(self, layout: Layout) -> bool:
        """Whether gradients of several micro-batches are summed before they are scattered, and so are held whole."""
        return self.job.global_batch is not None and self.job.num_micro_batches(layout) > 1

    def _units(self, layout: Layout, stage: int) -> LocalParameters:
        """Parameters of the largest layers that are whole at a time."""
        chunks = stage_layers(self.model, layout, stage, self.job.stage_layers)
        held = [layer for chunk in chunks for layer in chunk]
        kinds = {
            id(layer): layer_parameters_local(self.model, layer, layout, whole_shared=self._whole_shared)
            for layer in held
        }
        largest = sorted((kinds[id(layer)] for layer in held), key=lambda local: local.total)[-UNITS_GATHERED:]
        return sum(largest, start=LocalParameters())

    def _allowed(self, allowance: float) -> tuple[Finding, ...]:
        if not allowance:
            return ()
        message = (
            f"{format_bytes(allowance)} for the context ({format_bytes(self.context_bytes)}) and the allocator "
            f"({self.fragmentation:.0%} of what is not state) are assumed, not measured; compare with the peak that a "
            "run reserves"
        )
        return (Finding("memory_allowance_assumed", message),)

    def _whole(self, layout: Layout) -> tuple[Finding, ...]:
        if layout.zero != 2 or layout.dense_replicas < 2 or not self._accumulates(layout):
            return ()
        message = (
            "gradients are scattered once a step, so ZeRO 2 holds whole ones while micro-batches add up; frameworks "
            "that scatter those of every micro-batch hold less and move more"
        )
        return (Finding("gradients_held_whole", message),)
