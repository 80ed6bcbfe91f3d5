"""One layer in one layout: the rows a rank has, and what every builder of a part of a layer is given."""

from __future__ import annotations

from dataclasses import dataclass

from overlapsim.units import dtype_bytes
from overlapsim.workload.layout import Layout
from overlapsim.workload.model import Layer, ModelSpec
from overlapsim.workload.operators import CollectiveKind
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.routing import UNIFORM, Routing
from overlapsim.workload.weights import Matrix, layer_weights

NOT_SPLIT = ("q_down", "kv_down")
"""MLA's down-projections are the same on every tensor-parallel rank."""


@dataclass(frozen=True)
class Tokens:
    """Rows of one micro-batch on one rank.

    Attributes
    ----------
    batch, sequence : sequences of the micro-batch and tokens of one, before any split
    rows : tokens of a tensor-parallel group: what its GEMMs multiply
    local : tokens of one rank where norms and residuals are split along the sequence; else the same as `rows`
    """

    batch: int
    sequence: int
    rows: int
    local: int

    @classmethod
    def of(cls, layout: Layout, batch: int, sequence: int) -> Tokens:
        """Split `batch` sequences of `sequence` tokens as `layout` does."""
        rows = -(-batch * sequence // layout.context)
        split = layout.tp if layout.sequence_parallel else 1
        return cls(batch, sequence, rows, -(-rows // split))


@dataclass(frozen=True)
class Part:
    """What every builder of a part of a layer is given.

    Attributes
    ----------
    model, layer, layout, recipe, tokens : what is computed, how it is split, with which kernels, on which rows
    imbalance : rows of the fullest expert rank over the even share, from 1
    routing : how tokens spread over experts, where it is not one number
    """

    model: ModelSpec
    layer: Layer
    layout: Layout
    recipe: Recipe
    tokens: Tokens
    imbalance: float = 1.0
    routing: Routing = UNIFORM

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation's element."""
        return dtype_bytes(self.model.dtype)

    @property
    def gemm_dtype(self) -> str:
        """Type in which linear layers multiply."""
        return "fp8" if self.recipe.fp8 else self.model.dtype

    @property
    def hidden_bytes(self) -> float:
        """Bytes of the hidden activations of a tensor-parallel group."""
        return float(self.tokens.rows * self.model.hidden * self.element_bytes)

    @property
    def rope_kind(self) -> str:
        """Memory-bound operator that rotates queries and keys."""
        return "rope" if self.recipe.rope == "fused" else "torch_rope"

    @property
    def reduction(self) -> CollectiveKind:
        """Collective that sums a tensor-parallel group's partial results."""
        return "reduce_scatter" if self.layout.sequence_parallel else "all_reduce"

    def matrices(self, *operators: str) -> list[Matrix]:
        """Matrices of some operators of the layer, forward order."""
        weights = layer_weights(self.model, self.layer)
        return [w for w in weights if isinstance(w, Matrix) and w.operator in operators]


def local_sizes(matrix: Matrix, tp: int) -> tuple[int, int]:
    """Inputs and outputs of a matrix on one tensor-parallel rank: outputs are split but for the closing projections."""
    if matrix.part in NOT_SPLIT:
        return matrix.inputs, matrix.outputs
    if matrix.operator in ("attn.out", "mlp.fc2", "moe.shared.fc2"):
        return -(-matrix.inputs // tp), matrix.outputs
    return matrix.inputs, -(-matrix.outputs // tp)


def norm_kind(model: ModelSpec) -> str:
    """Memory-bound operator of the model's norm."""
    return "layernorm" if model.norm == "layernorm" else "rmsnorm"
