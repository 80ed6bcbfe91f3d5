"""Recipe: which kernels a framework runs for the same model; what published setups ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from overlapsim.workload.model import check_choice, check_flags, check_size
from overlapsim.workload.vocabulary import VOCABULARY_MULTIPLE

AttentionKernel = Literal["flash", "unfused"]
Accumulation = Literal["fused", "separate"]
LossKernel = Literal["fused", "chain"]
OptimizerKernel = Literal["adam", "chain"]
Dispatcher = Literal["all_to_all", "all_gather"]


@dataclass(frozen=True)
class Recipe:
    """Software choices that change which kernels run, not what they compute.

    Attributes
    ----------
    attention : ``flash`` (one fused kernel) or ``unfused`` (scores, softmax, context as kernels of their own)
    fused_softmax : unfused attention scales, masks and takes the softmax in one kernel, where its rules allow
    fused_bias : biases are added by the kernel of the GELU or of the dropout behind them; False: each its own kernel
    dropout : attention probabilities and both residual branches are dropped
    accumulation : weight gradients are added to the main gradient by their GEMM (``fused``) or by another kernel
    loss : cross entropy in one kernel, or as a chain of fp32 kernels
    optimizer : one fused Adam, or unscale, norm, clip, step and cast as chains of kernels
    dispatcher : how tokens reach experts: exchanged (``all_to_all``) or gathered and scattered again (``all_gather``)
    tp_overlap : in the backward pass of a column-split layer, what tensor parallelism moves runs beside its GEMMs: the
        gather of its input beside the input gradient, the sum of that beside the weight gradient (Megatron-LM from 2022
        on, with ``CUDA_DEVICE_MAX_CONNECTIONS=1``)
    vocabulary_multiple : the vocabulary is padded to a multiple of this and of the tensor-parallel degree; 1 leaves an
        odd one odd, and its GEMMs without aligned rows
    fp8 : linear layers quantise their operands and multiply in fp8
    """

    attention: AttentionKernel = "flash"
    fused_softmax: bool = True
    fused_bias: bool = True
    dropout: bool = False
    accumulation: Accumulation = "fused"
    loss: LossKernel = "fused"
    optimizer: OptimizerKernel = "adam"
    dispatcher: Dispatcher = "all_to_all"
    tp_overlap: bool = True
    vocabulary_multiple: int = VOCABULARY_MULTIPLE
    fp8: bool = False

    def __post_init__(self) -> None:
        check_choice("attention", self.attention, get_args(AttentionKernel))
        check_choice("accumulation", self.accumulation, get_args(Accumulation))
        check_choice("loss", self.loss, get_args(LossKernel))
        check_choice("optimizer", self.optimizer, get_args(OptimizerKernel))
        check_choice("dispatcher", self.dispatcher, get_args(Dispatcher))
        check_size("vocabulary_multiple", self.vocabulary_multiple)
        check_flags(self, "fused_softmax", "fused_bias", "dropout", "tp_overlap", "fp8")


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
