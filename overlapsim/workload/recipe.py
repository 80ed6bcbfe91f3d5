"""Recipe: which kernels a framework runs for the same model; what published setups ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

from overlapsim.errors import WorkloadError
from overlapsim.workload.dispatchers import Dispatcher, DispatchOptions, parse_dispatch
from overlapsim.workload.model import check_choice, check_flags, check_size
from overlapsim.workload.vocabulary import VOCABULARY_MULTIPLE

AttentionKernel = Literal["flash", "unfused"]
Accumulation = Literal["fused", "separate"]
LossKernel = Literal["fused", "chain"]
OptimizerKernel = Literal["adam", "chain"]
RopeKernels = Literal["fused", "torch"]
RouterKernels = Literal["fused", "gate_chain", "chain", "drop_chain"]
SharedExperts = Literal["own", "joined", "whole"]
PermutationKernels = Literal["fused", "torch"]
ExpertKernels = Literal["grouped", "looped"]
Compress = Literal["grads-bf16", "tp-fp8", "params-fp8"]
COMPRESSIONS: Final[tuple[Compress, ...]] = get_args(Compress)
"""Narrower collectives of MegaScale-MoE (arXiv 2505.11432, section 5), which change results: fp32 gradients cast to
bf16, exchanged and summed in fp32 by each data-parallel rank; tensor parallelism's sums of partial outputs, and its
gathers of gradients, in fp8 with scales; ZeRO's gather of parameters in fp8."""


@dataclass(frozen=True)
class Recipe:
    """Software choices that change which kernels run, not what they compute (but for `fp8` and `compress`).

    Attributes
    ----------
    attention : ``flash`` (one fused kernel) or ``unfused`` (scores, softmax, context as kernels of their own)
    fused_softmax : unfused attention scales, masks and takes the softmax in one kernel, where its rules allow
    fused_bias : biases are added by the kernel of the GELU or of the dropout behind them; False: each its own kernel
    dropout : attention probabilities and both residual branches are dropped
    accumulation : weight gradients are added to the main gradient by their GEMM (``fused``) or by another kernel
    loss : cross entropy in one kernel, or as a chain of fp32 kernels
    optimizer : one fused Adam, or unscale, norm, clip, step and cast as chains of kernels
    rope : queries and keys are rotated in one kernel, or by the framework's chain (halves, products, sums)
    router : top-k, softmax, auxiliary loss and indices of routing in a few kernels, or as the framework's chain of tiny
        ones, in which the host reads how many copies each expert gets; ``drop_chain``: the longer one of MegaScale-MoE
        with capacity and auxiliary loss of each device; ``gate_chain``: the gate's alone, where kernels of the
        experts find places themselves
    shared : shared experts gather their input and sum their output for themselves, or are ``joined``: they read the
        rows gathered for the routed experts of the same ranks, and one reduce-scatter takes both home; ``whole``: each
        rank has all of them, for its own tokens
    permutation : copies of tokens are ordered by expert in one kernel each way, or by the framework's gather and
        scatter_add
    experts : GEMMs of all experts in one kernel, or ``looped``: one kernel an expert
    dispatcher : how tokens reach experts: exchanged (``all_to_all``), gathered and scattered again (``all_gather``),
        exchanged between nodes and then inside them (``hierarchical``), or by kernels made for it (``deepep``,
        ``deepep_v2``, ``deepep_low_latency``, ``hybrid_ep``)
    dispatch : numbers of the dispatcher
    tp_overlap : in the backward pass of a column-split layer, what tensor parallelism moves runs beside its GEMMs: the
        gather of its input beside the input gradient, the sum of that beside the weight gradient (Megatron-LM from 2022
        on, with ``CUDA_DEVICE_MAX_CONNECTIONS=1``)
    vocabulary_multiple : the vocabulary is padded to a multiple of this and of the tensor-parallel degree; 1 leaves an
        odd one odd, and its GEMMs without aligned rows
    fp8 : linear layers quantise their operands and multiply in fp8
    compress : of `COMPRESSIONS`, in their order; none unless asked for
    """

    attention: AttentionKernel = "flash"
    fused_softmax: bool = True
    fused_bias: bool = True
    dropout: bool = False
    accumulation: Accumulation = "fused"
    loss: LossKernel = "fused"
    optimizer: OptimizerKernel = "adam"
    rope: RopeKernels = "fused"
    router: RouterKernels = "fused"
    shared: SharedExperts = "own"
    permutation: PermutationKernels = "fused"
    experts: ExpertKernels = "grouped"
    dispatcher: Dispatcher = "all_to_all"
    dispatch: DispatchOptions = field(default_factory=DispatchOptions)
    tp_overlap: bool = True
    vocabulary_multiple: int = VOCABULARY_MULTIPLE
    fp8: bool = False
    compress: tuple[Compress, ...] = ()

    def __post_init__(self) -> None:
        check_choice("attention", self.attention, get_args(AttentionKernel))
        check_choice("accumulation", self.accumulation, get_args(Accumulation))
        check_choice("loss", self.loss, get_args(LossKernel))
        check_choice("optimizer", self.optimizer, get_args(OptimizerKernel))
        check_choice("rope", self.rope, get_args(RopeKernels))
        check_choice("router", self.router, get_args(RouterKernels))
        check_choice("shared", self.shared, get_args(SharedExperts))
        check_choice("permutation", self.permutation, get_args(PermutationKernels))
        check_choice("experts", self.experts, get_args(ExpertKernels))
        check_choice("dispatcher", self.dispatcher, get_args(Dispatcher))
        check_size("vocabulary_multiple", self.vocabulary_multiple)
        check_flags(self, "fused_softmax", "fused_bias", "dropout", "tp_overlap", "fp8")
        _check_compress(self.compress)
        if "params-fp8" in self.compress and not self.fp8:
            raise WorkloadError("parameters are gathered in fp8 and GEMMs do not read fp8; expected fp8 as well")


def with_dispatch(recipe: Recipe, text: str) -> Recipe:
    """The recipe with another dispatcher, given as `parse_dispatch` reads it; empty changes nothing."""
    if not text:
        return recipe
    dispatcher, options = parse_dispatch(text)
    return replace(recipe, dispatcher=dispatcher, dispatch=options)


def parse_compress(text: str) -> tuple[Compress, ...]:
    """Read compressions such as ``grads-bf16,tp-fp8``; empty: none.

    Raises
    ------
    WorkloadError
        If an entry is unknown or there twice.

    Examples
    --------
    >>> parse_compress("tp-fp8, grads-bf16")
    ('grads-bf16', 'tp-fp8')
    """
    given = tuple(filter(None, (entry.strip() for entry in text.split(","))))
    found = tuple(entry for entry in COMPRESSIONS if entry in given)
    _check_compress(found if len(found) == len(given) else given)
    return found


def _check_compress(given: tuple[str, ...]) -> None:
    if list(given) != [entry for entry in COMPRESSIONS if entry in given]:
        raise WorkloadError(
            f"compress is {','.join(given)!r}; expected some of {', '.join(COMPRESSIONS)}, each once and in this order"
        )


RECIPES: Final[Mapping[str, Recipe]] = {
    "modern": Recipe(),
    # Megatron-LM of 2021: no flash attention, gradients accumulated by a kernel of their own, fp32 loss chain
    # (hwprofiles/SOURCES.md, OP-BYTES).
    "megatron-2021": Recipe(
        attention="unfused", dropout=True, accumulation="separate", loss="chain", optimizer="chain", tp_overlap=False
    ),
    # The same a year later, with sequence parallelism: the backward pass overlaps what that moves (Korthikanti et al.,
    # arXiv 2205.05198).
    "megatron-2022": Recipe(
        attention="unfused", dropout=True, accumulation="separate", loss="chain", optimizer="chain"
    ),
}
"""Recipes by name."""
