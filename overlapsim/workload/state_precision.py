"""Bytes of a parameter's state: itself, its gradient, the main copy and the optimizer's moments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from overlapsim.errors import WorkloadError
from overlapsim.units import dtype_bytes
from overlapsim.workload.model import check_size
from overlapsim.workload.recipe import Recipe

_MASTER: Final = "fp32"
# Copies of a weight in fp8, by rows for the forward and by columns for the backward GEMMs, kept over a step's
# micro-batches (Transformer Engine's weight workspace).
_FP8_COPIES: Final = 2


@dataclass(frozen=True)
class StatePrecision:
    """Bytes of state for each parameter.

    Attributes
    ----------
    parameter_bytes : weights that GEMMs read, with copies in fp8 if there are
    gradient_bytes : gradient in which micro-batches are added up
    main_bytes : main copy that the optimizer steps; 0 if it steps the weights themselves
    moment_bytes : moments of the optimizer together
    gathered_bytes : what ZeRO gathers of a parameter, from which copies are made where it arrives

    Examples
    --------
    Mixed precision with fp32 gradients takes 18 bytes a parameter, with 16-bit gradients 16:

    >>> state_precision("bf16").total_bytes, state_precision("fp16", gradient="fp16").total_bytes
    (18, 16)
    """

    parameter_bytes: int
    gradient_bytes: int
    main_bytes: int
    moment_bytes: int
    gathered_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("parameter_bytes", "gradient_bytes", "main_bytes", "moment_bytes", "gathered_bytes"):
            check_size(name, getattr(self, name), low=0)

    @property
    def optimizer_bytes(self) -> int:
        """Main copy and moments: what ZeRO-1 shards."""
        return self.main_bytes + self.moment_bytes

    @property
    def total_bytes(self) -> int:
        """All state of a parameter that nothing shards."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def state_precision(
    dtype: str, *, gradient: str = "fp32", moments: str = "fp32", fp8: bool = False, fp8_parameters: bool = False
) -> StatePrecision:
    """Widths of Adam's state in mixed precision.

    Parameters
    ----------
    dtype : str
        Of the weights: ``bf16`` or ``fp16`` with a main copy in fp32, or ``fp32`` without.
    gradient : str
        Type in which gradients are added up and reduced.
    moments : str
        Type of both moments.
    fp8 : bool
        GEMMs read copies in fp8; taken for all parameters, though embeddings and norms have none.
    fp8_parameters : bool
        There are only those copies (``--fp8-param-gather``).

    Raises
    ------
    WorkloadError
        If the weights' type is another, or fp8 parameters are asked for without fp8.
    UsageError
        If a type is unknown.

    Examples
    --------
    >>> state_precision("bf16", fp8=True, fp8_parameters=True)
    StatePrecision(parameter_bytes=2, gradient_bytes=4, main_bytes=4, moment_bytes=8, gathered_bytes=1)
    """
    if dtype not in ("bf16", "fp16", "fp32"):
        raise WorkloadError(f"weights of {dtype!r}; expected bf16, fp16 or fp32 (fp8 as copies of these)")
    if fp8_parameters and not fp8:
        raise WorkloadError("fp8_parameters without fp8; expected fp8 as well")
    own = 0 if fp8_parameters else dtype_bytes(dtype)
    main = 0 if dtype == _MASTER else dtype_bytes(_MASTER)
    copies = _FP8_COPIES * dtype_bytes("fp8") if fp8 else 0
    gathered = dtype_bytes("fp8" if fp8_parameters else dtype)
    return StatePrecision(own + copies, dtype_bytes(gradient), main, 2 * dtype_bytes(moments), gathered)


def recipe_precision(dtype: str, recipe: Recipe) -> StatePrecision:
    """Widths of a model's state as a recipe runs it, gradients in fp32."""
    return state_precision(dtype, fp8=recipe.fp8, fp8_parameters="params-fp8" in recipe.compress)
