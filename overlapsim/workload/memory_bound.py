"""What memory-bound operators read and write: bytes and FLOP counted from shapes, one table for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from overlapsim.errors import WorkloadError
from overlapsim.units import dtype_bytes

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Traffic:
    """Work of one element of the operator's grid (rows x columns), and of one row.

    Attributes
    ----------
    elements : elements of the operator's dtype moved per grid element
    fixed_bytes : bytes moved per grid element whatever the dtype (fp32 state, masks)
    row_bytes : bytes moved per row (statistics, indices)
    column_bytes : bytes moved per column (weights)
    flop : operations per grid element, for the record: these operators never run at the peak
    kernels : launches
    per_topk : elements moved per grid element and routed copy less one (see ``moe_unpermute``)
    synced : whether the host reads a result before it goes on, so that what follows is launched onto an idle GPU
    """

    elements: float
    fixed_bytes: float = 0.0
    row_bytes: float = 0.0
    column_bytes: float = 0.0
    flop: float = 1.0
    kernels: int = 1
    per_topk: float = 0.0
    synced: bool = False


# One line an operator and pass. Grid: tokens x hidden unless said. "r" reads, "w" writes, in elements of the dtype.
# Forward and backward counts of layernorm, dropout, gelu, softmax, bias, gradient accumulation and cross-entropy
# are those with which published training steps of A100 clusters are reproduced (hwprofiles/SOURCES.md, OP-BYTES).
TRAFFIC: Final[dict[tuple[str, str], Traffic]] = {
    # r x, w y; fp32 mean and rstd a row; weight (and bias) a column.
    ("rmsnorm", "fwd"): Traffic(2.0, row_bytes=4.0, column_bytes=2.0, flop=4.0),
    ("layernorm", "fwd"): Traffic(2.0, row_bytes=8.0, column_bytes=4.0, flop=7.0),
    # r dy, x, w dx; r both again for the weight gradients.
    ("rmsnorm", "bwd"): Traffic(5.0, row_bytes=8.0, column_bytes=6.0, flop=11.0, kernels=2),
    ("layernorm", "bwd"): Traffic(5.0, row_bytes=16.0, column_bytes=12.0, flop=14.0, kernels=2),
    # Norm of a sum: r x and residual, w sum and norm.
    ("add_rmsnorm", "fwd"): Traffic(4.0, row_bytes=4.0, column_bytes=2.0, flop=5.0),
    ("add", "fwd"): Traffic(3.0),
    ("add", "bwd"): Traffic(2.0),
    ("bias_add", "fwd"): Traffic(2.0, column_bytes=2.0),
    ("bias_add", "bwd"): Traffic(1.0, column_bytes=4.0),
    # Dropout keeps a mask of one byte an element.
    ("dropout", "fwd"): Traffic(2.0, fixed_bytes=1.0, flop=2.0),
    ("dropout", "bwd"): Traffic(2.0, fixed_bytes=1.0, flop=2.0),
    ("bias_dropout_add", "fwd"): Traffic(3.0, fixed_bytes=1.0, column_bytes=2.0, flop=4.0),
    ("bias_dropout_add", "bwd"): Traffic(2.0, fixed_bytes=1.0, flop=2.0),
    # Grid: tokens x output columns. A gated activation reads two halves.
    ("gelu", "fwd"): Traffic(2.0, flop=10.0),
    ("gelu", "bwd"): Traffic(3.0, flop=14.0),
    ("bias_gelu", "fwd"): Traffic(2.0, column_bytes=2.0, flop=11.0),
    ("bias_gelu", "bwd"): Traffic(3.0, column_bytes=2.0, flop=15.0),
    ("silu_mul", "fwd"): Traffic(3.0, flop=6.0),
    ("silu_mul", "bwd"): Traffic(5.0, flop=10.0),
    # Grid: tokens x rotated elements (queries and keys together); cos and sin of a position stay in cache.
    ("rope", "fwd"): Traffic(2.0, flop=3.0),
    ("rope", "bwd"): Traffic(2.0, flop=3.0),
    # Its chain without a kernel of its own, for queries and for keys (MEGATRON-MOE): split, negate, join, two
    # products, a sum, join; cos and sin are cast for each.
    ("torch_rope", "fwd"): Traffic(14.0, flop=4.0, kernels=18),
    ("torch_rope", "bwd"): Traffic(16.0, flop=4.0, kernels=20),
    # Grid: all rows of scores x keys. Causal: the fused kernel reads the lower half and writes all of it.
    ("softmax", "fwd"): Traffic(2.0, flop=5.0),
    ("softmax", "bwd"): Traffic(3.0, flop=4.0),
    ("causal_softmax", "fwd"): Traffic(1.5, flop=5.0),
    ("causal_softmax", "bwd"): Traffic(1.5, flop=4.0),
    # Scale, mask, cast, softmax and cast back as kernels of their own.
    ("unfused_softmax", "fwd"): Traffic(6.0, flop=8.0, kernels=5),
    ("unfused_softmax", "bwd"): Traffic(7.0, flop=8.0, kernels=5),
    # Logits of one expert each, tokens x experts: softmax and top-k in fp32 with the chosen ones written.
    ("router", "fwd"): Traffic(1.0, fixed_bytes=12.0, row_bytes=12.0, flop=8.0, kernels=3),
    ("router", "bwd"): Traffic(1.0, fixed_bytes=8.0, row_bytes=12.0, flop=6.0, kernels=3),
    # The same without kernels of its own, counted in Megatron-LM of October 2024 (SOURCES.md, MEGATRON-MOE): top-k,
    # softmax, histogram, auxiliary loss; its backward; and the indices of the permutation behind them (masks,
    # selections, sorts), for which the host reads how many copies each expert gets. Each moves fp32 or indices.
    ("gate", "fwd"): Traffic(1.0, fixed_bytes=112.0, flop=14.0, kernels=14),
    ("gating", "fwd"): Traffic(1.0, fixed_bytes=112.0, flop=14.0, kernels=14, synced=True),
    ("gating", "bwd"): Traffic(1.0, fixed_bytes=144.0, flop=18.0, kernels=18),
    ("routing_index", "fwd"): Traffic(0.0, fixed_bytes=256.0, flop=32.0, kernels=32),
    # The same in MegaScale-MoE, which drops copies beyond a device's capacity; its code is not public: as many
    # kernels as give 'other' of one published row (SOURCES.md, MSMOE-GATING).
    ("routing_drop", "fwd"): Traffic(0.0, fixed_bytes=544.0, flop=68.0, kernels=68),
    # Permutation by gather and scatter_add of the framework, twice (to this rank's experts, then by expert); grid: this
    # rank's routed copies x hidden. fwd: two gathers; bwd: zeros and adds of both; weighting is a kernel, as is the sum
    # over one copy. An add reads the copy and reads and writes its place.
    ("torch_permute", "fwd"): Traffic(4.0, row_bytes=16.0, flop=0.0, kernels=2),
    ("torch_permute", "bwd"): Traffic(8.0, row_bytes=16.0, flop=2.0, kernels=4),
    ("torch_unpermute", "fwd"): Traffic(12.0, row_bytes=16.0, flop=4.0, kernels=6),
    ("torch_unpermute", "bwd"): Traffic(10.0, row_bytes=16.0, flop=3.0, kernels=5),
    # Grid: routed copies (tokens x topk) x hidden; r a token for each copy, w it where its expert wants it.
    ("moe_permute", "fwd"): Traffic(2.0, row_bytes=8.0, flop=0.0),
    # Grid: tokens x hidden; r topk weighted copies, w their sum.
    ("moe_unpermute", "fwd"): Traffic(2.0, row_bytes=8.0, flop=2.0, per_topk=1.0),
    ("moe_permute", "bwd"): Traffic(2.0, row_bytes=8.0, flop=1.0),
    # r dy and each copy (for the gradient of its weight), w its gradient.
    ("moe_unpermute", "bwd"): Traffic(3.0, row_bytes=8.0, flop=2.0, per_topk=2.0),
    ("gather", "fwd"): Traffic(2.0, row_bytes=8.0, flop=0.0),
    ("scatter", "fwd"): Traffic(2.0, row_bytes=8.0, flop=0.0),
    ("scatter_add", "fwd"): Traffic(3.0, row_bytes=8.0),
    ("embedding", "fwd"): Traffic(2.0, row_bytes=8.0, flop=0.0),
    # r dy, r and w the touched rows of an fp32 gradient.
    ("embedding", "bwd"): Traffic(1.0, fixed_bytes=8.0, row_bytes=8.0),
    ("transpose", "fwd"): Traffic(2.0, flop=0.0),
    ("copy", "fwd"): Traffic(2.0, flop=0.0),
    # r the dtype, w one byte and a scale for each 128 elements (fp8 quantisation).
    ("quantize_fp8", "fwd"): Traffic(1.0, fixed_bytes=1.0 + 4.0 / 128, flop=3.0),
    ("quantize_mxfp8", "fwd"): Traffic(1.0, fixed_bytes=1.0 + 1.0 / 32, flop=3.0),
    # r one byte and the scale, w the dtype.
    ("dequantize_fp8", "fwd"): Traffic(1.0, fixed_bytes=1.0 + 4.0 / 128, flop=1.0),
    # Grid: elements of one rank's shard; r a copy of topk ranks in the dtype, w their fp32 or two-byte sum.
    ("shard_sum", "fwd"): Traffic(1.0, fixed_bytes=4.0, per_topk=1.0),
    ("shard_sum_half", "fwd"): Traffic(1.0, fixed_bytes=2.0, row_bytes=4.0, per_topk=1.0),
    # fp32 gradients r, their two-byte copies w.
    ("grad_cast", "fwd"): Traffic(0.0, fixed_bytes=6.0),
    # Grid: tokens x vocabulary of this rank. Chain of fp32 kernels: cast, max, subtract, exp, sum, divide; then scale
    # and cast: 54 bytes a logit in all for two-byte logits.
    ("cross_entropy", "fwd"): Traffic(1.0, fixed_bytes=36.0, row_bytes=24.0, flop=6.0, kernels=8),
    ("cross_entropy", "bwd"): Traffic(1.0, fixed_bytes=14.0, row_bytes=8.0, flop=3.0, kernels=3),
    # One kernel that reads logits twice and writes their gradient in place.
    ("fused_cross_entropy", "fwd"): Traffic(3.0, row_bytes=16.0, flop=8.0),
    ("fused_cross_entropy", "bwd"): Traffic(2.0, flop=1.0),
    # Grid: parameters of this rank as rows x 1, whatever the dtype of the model.
    # fp32 master weight, two moments and gradient r; weight and moments w; two-byte copy w.
    ("adam", "fwd"): Traffic(0.0, fixed_bytes=30.0, flop=14.0),
    ("sgd", "fwd"): Traffic(0.0, fixed_bytes=22.0, flop=4.0),
    # Unscale, norm, clip, step and cast as chains of kernels: 60 bytes a parameter.
    ("optimizer_step", "fwd"): Traffic(0.0, fixed_bytes=60.0, flop=20.0, kernels=5),
    ("grad_norm", "fwd"): Traffic(0.0, fixed_bytes=4.0, flop=2.0, kernels=2),
    ("grad_clip", "fwd"): Traffic(0.0, fixed_bytes=8.0),
    # Each micro-batch adds a two-byte gradient to the fp32 one.
    ("grad_accumulate", "fwd"): Traffic(0.0, fixed_bytes=10.0),
    ("zero", "fwd"): Traffic(1.0, flop=0.0),
}
MEMORY_KINDS: Final = tuple(dict.fromkeys(kind for kind, _ in TRAFFIC))
"""Operators that `memory_cost` prices."""
FITTED_LIKE: Final = {
    "add_rmsnorm": "rmsnorm",
    "bias_gelu": "gelu",
    "causal_softmax": "softmax",
    "bias_add": "add",
    "bias_dropout_add": "add",
    "quantize_mxfp8": "quantize_fp8",
    "dequantize_fp8": "quantize_fp8",
    "shard_sum": "add",
    "shard_sum_half": "add",
    "grad_cast": "copy",
}
"""Whose fit an operator takes where it has none of its own."""


@dataclass(frozen=True)
class MemoryOp:
    """A memory-bound operator on one rank: its kind and grid (see `TRAFFIC` for what rows and columns are).

    Attributes
    ----------
    kind : one of `MEMORY_KINDS`
    rows, columns : the grid
    dtype : of its elements
    pass_ : ``fwd`` or ``bwd``
    topk : routed copies of a token (``moe_unpermute``), or ranks whose shards are summed (``shard_sum``)
    """

    kind: str
    rows: int
    columns: int
    dtype: str = "bf16"
    pass_: str = "fwd"
    topk: int = 1

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "topk"):
            if getattr(self, name) < 1:
                raise WorkloadError(f"{self.kind} has {name} of {getattr(self, name)}; expected at least 1")
        traffic_of(self.kind, self.pass_)
        dtype_bytes(self.dtype)

    @property
    def hbm_bytes(self) -> float:
        """Bytes read and written, each access once."""
        return float(memory_bytes(self.kind, self.rows, self.columns, self.dtype, self.pass_, self.topk))

    @property
    def flop(self) -> float:
        """Operations, exponentials and square roots counted as one."""
        return traffic_of(self.kind, self.pass_).flop * self.rows * self.columns


def traffic_of(kind: str, pass_: str = "fwd") -> Traffic:
    """Line of `TRAFFIC`.

    Raises
    ------
    WorkloadError
        If the operator is unknown or has no such pass.
    """
    found = TRAFFIC.get((kind, pass_))
    if found is None:
        if kind not in MEMORY_KINDS:
            raise WorkloadError(f"memory-bound operator {kind!r} is unknown; expected one of {', '.join(MEMORY_KINDS)}")
        raise WorkloadError(f"{kind} has no pass {pass_!r}; expected fwd" + " or bwd" * ((kind, "bwd") in TRAFFIC))
    return found


def memory_bytes(
    kind: str, rows: ArrayLike, columns: ArrayLike, dtype: str = "bf16", pass_: str = "fwd", topk: ArrayLike = 1
) -> FloatArray:
    """Bytes that an operator moves, for arrays of shapes.

    Examples
    --------
    >>> float(memory_bytes("silu_mul", 4096, 28672))
    704643072.0
    """
    traffic = traffic_of(kind, pass_)
    rows, columns, topk = (np.asarray(values, dtype=np.float64) for values in (rows, columns, topk))
    elements = traffic.elements + traffic.per_topk * (topk - 1)
    per_element = elements * dtype_bytes(dtype) + traffic.fixed_bytes
    total: FloatArray = rows * columns * per_element + rows * traffic.row_bytes + columns * traffic.column_bytes
    return total
