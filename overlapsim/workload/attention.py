"""Attention shapes and their work: visible pairs, FLOP and bytes, for one shape or arrays of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from overlapsim.errors import WorkloadError
from overlapsim.units import dtype_bytes

FloatArray = NDArray[np.float64]

# Queries of one step that decode kernels take together (a token, or a few drafted ones).
DECODE_QUERIES: Final = 16
# Flash backward: S and dP again, then dQ, dK, dV: five products where the forward has two.
BACKWARD_PRODUCTS: Final = 2.5


@dataclass(frozen=True)
class AttentionOp:
    """Scaled dot-product attention of one rank.

    Multi-head latent attention is one key head of ``latent + rope`` elements
    whose values are the first ``latent`` of them when absorbed
    (``kv_heads=1, head_dim=576, value_dim=512, shared_kv=True``), and plain
    attention with ``head_dim=192, value_dim=128`` when not.

    Attributes
    ----------
    batch : sequences
    q_len, kv_len : queries of a sequence, and keys (those queries included)
    heads, kv_heads : query heads and key heads on this rank; ``heads`` is a multiple of ``kv_heads``
    head_dim, value_dim : elements of a query or key, and of a value (``head_dim`` when 0)
    causal : a query sees no later key; the last query sees all
    dtype, kv_dtype : of queries and outputs, and of keys and values (``dtype`` when empty)
    shared_kv : values are part of the keys and are not stored again
    pass_ : ``fwd`` or ``bwd`` (dQ, dK and dV together)
    """

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int = 0
    causal: bool = True
    dtype: str = "bf16"
    kv_dtype: str = ""
    shared_kv: bool = False
    pass_: str = "fwd"

    def __post_init__(self) -> None:
        for name in ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise WorkloadError(f"attention {name} is {getattr(self, name)}; expected at least 1")
        if self.value_dim < 0:
            raise WorkloadError(f"attention value_dim is {self.value_dim}; expected 0 (as head_dim) or more")
        if self.heads % self.kv_heads:
            raise WorkloadError(f"{self.heads} query heads do not divide over {self.kv_heads} key heads")
        if self.causal and self.q_len > self.kv_len:
            raise WorkloadError(f"causal attention of {self.q_len} queries over {self.kv_len} keys; expected no more")
        if self.pass_ not in ("fwd", "bwd"):
            raise WorkloadError(f"attention pass is {self.pass_!r}; expected fwd or bwd")
        dtype_bytes(self.dtype), dtype_bytes(self.kv_dtype or self.dtype)

    @property
    def shapes(self) -> AttentionShapes:
        """The same as arrays of one element."""
        return AttentionShapes.of([self])

    @property
    def flop(self) -> float:
        """Operations on visible pairs, a multiply-add counted as two."""
        return float(self.shapes.flop[0])

    @property
    def hbm_bytes(self) -> float:
        """Bytes of operands and results, each once."""
        return float(self.shapes.hbm_bytes[0])


@dataclass(frozen=True)
class UnfusedAttention:
    """Attention as kernels of their own: scores, softmax, dropout, context; every product computes all pairs.

    Attributes
    ----------
    op : shape and pass
    fused_softmax : scale, mask and softmax in one kernel
    dropout : whether attention probabilities are dropped
    """

    op: AttentionOp
    fused_softmax: bool = True
    dropout: bool = False

    @property
    def flop(self) -> float:
        """Operations on visible pairs, as the fused kernel counts them: what any kernel must do."""
        return self.op.flop

    @property
    def hbm_bytes(self) -> float:
        """Operands and results, each once: what any kernel must move."""
        return self.op.hbm_bytes


@dataclass(frozen=True)
class FusedAttention:
    """Several attentions in one kernel call, prompts and decodes of one step say: their CTAs share the GPU.

    Attributes
    ----------
    ops : all forward
    """

    ops: tuple[AttentionOp, ...]

    def __post_init__(self) -> None:
        if not self.ops or any(op.pass_ != "fwd" for op in self.ops):
            raise WorkloadError(f"a fused call of {len(self.ops)} attentions; expected at least one, all forward")

    @property
    def flop(self) -> float:
        """Operations of all of them."""
        return sum(op.flop for op in self.ops)

    @property
    def hbm_bytes(self) -> float:
        """Bytes of all of them."""
        return sum(op.hbm_bytes for op in self.ops)


@dataclass(frozen=True, eq=False)
class AttentionShapes:
    """Arrays of one length for many operators; columns as `AttentionOp`, dtypes as bytes of an element."""

    batch: FloatArray
    q_len: FloatArray
    kv_len: FloatArray
    heads: FloatArray
    kv_heads: FloatArray
    head_dim: FloatArray
    value_dim: FloatArray
    causal: FloatArray
    element_bytes: FloatArray
    kv_element_bytes: FloatArray
    shared_kv: FloatArray
    backward: FloatArray

    @classmethod
    def of(cls, ops: list[AttentionOp]) -> Self:
        """Arrays of a list of operators."""
        table = np.array(
            [
                (
                    op.batch,
                    op.q_len,
                    op.kv_len,
                    op.heads,
                    op.kv_heads,
                    op.head_dim,
                    op.value_dim or op.head_dim,
                    op.causal,
                    dtype_bytes(op.dtype),
                    dtype_bytes(op.kv_dtype or op.dtype),
                    op.shared_kv,
                    op.pass_ == "bwd",
                )
                for op in ops
            ],
            dtype=np.float64,
        ).reshape(-1, len(fields(cls)))
        return cls(*table.T)

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, where: NDArray[np.bool_] | NDArray[np.intp]) -> Self:
        return type(self)(*(getattr(self, item.name)[where] for item in fields(self)))

    @property
    def pairs(self) -> FloatArray:
        """Visible (query, key) pairs of one head of one sequence: the causal triangle with its diagonal."""
        return self.q_len * self.kv_len - self.causal * self.q_len * (self.q_len - 1) / 2

    @property
    def flop(self) -> FloatArray:
        """``2 b h pairs (head_dim + value_dim)``, times 2.5 in the backward pass; softmax is not counted."""
        products = np.where(self.backward > 0, BACKWARD_PRODUCTS, 1.0)
        return 2 * products * self.batch * self.heads * self.pairs * (self.head_dim + self.value_dim)

    @property
    def kv_bytes(self) -> FloatArray:
        """Keys and values, once."""
        stored = self.head_dim + np.where(self.shared_kv > 0, 0.0, self.value_dim)
        return self.kv_element_bytes * self.batch * self.kv_len * self.kv_heads * stored

    @property
    def q_bytes(self) -> FloatArray:
        """Queries and outputs, once."""
        return self.element_bytes * self.batch * self.q_len * self.heads * (self.head_dim + self.value_dim)

    @property
    def hbm_bytes(self) -> FloatArray:
        """Operands and results once; backward twice the forward: q, k, v, o, dO are read and dQ, dK, dV written."""
        return (self.q_bytes + self.kv_bytes) * np.where(self.backward > 0, 2.0, 1.0)

    @property
    def decode(self) -> NDArray[np.bool_]:
        """Whether a decode kernel runs it: a few queries against a cache."""
        few: NDArray[np.bool_] = (self.q_len <= DECODE_QUERIES) & (self.kv_len > self.q_len) & (self.backward == 0)
        return few
