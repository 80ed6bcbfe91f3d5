"""What the backward pass rebuilds instead of finding it kept: nothing, named modules, or whole layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from overlapsim.errors import WorkloadError
from overlapsim.workload.model import check_choice, check_size

Granularity = Literal["none", "selective", "full"]
Method = Literal["uniform", "block"]
MODULES: Final = (
    *("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"),
    *("mlp_act", "attn_exchange", "moe_dispatch"),
)
"""Megatron-LM's names, and three more: activations of dense blocks, Ulysses' exchange of the attention output, and the
dispatch of tokens to experts (both exchanged again)."""
SELECTIVE: Final = frozenset({"core_attn"})
"""Selective recompute of Korthikanti et al. (arXiv 2205.05198): attention's scores."""
SAR: Final = frozenset({"layernorm", "mlp_act", "moe_act", "attn_exchange", "moe_dispatch"})
"""Selective activation rematerialisation of MegaScale-MoE (arXiv 2505.11432, section 4.1)."""
_NAMES: Final = {"selective": SELECTIVE, "sar": SAR}


@dataclass(frozen=True)
class Activation:
    """One tensor of one micro-batch on one rank.

    Attributes
    ----------
    operator, tensor : operator it belongs to, and its name there
    size_bytes : bytes on this rank
    needed : whether the backward pass reads it; others are freed on the way
    modules : recompute of any of these rebuilds it
    """

    operator: str
    tensor: str
    size_bytes: float
    needed: bool = True
    modules: frozenset[str] = frozenset()

    def kept(self, modules: frozenset[str]) -> bool:
        """Whether it stays until the backward pass where these modules are rebuilt."""
        return self.needed and not self.modules & modules


@dataclass(frozen=True)
class Recompute:
    """Recompute of one job.

    Attributes
    ----------
    granularity : ``none``, ``selective`` (named modules) or ``full`` (whole layers)
    modules : of `MODULES`, for selective
    method : for full: ``uniform`` keeps the input of every `num_layers` layers of a chunk, ``block`` that of each of
        its first `num_layers` layers, and the other layers whole
    num_layers : see `method`

    Raises
    ------
    WorkloadError
        If a module or method is unknown, or they contradict the granularity.

    Examples
    --------
    >>> Recompute.parse("sar").modules == SAR, Recompute.parse("layernorm+moe_act").granularity
    (True, 'selective')
    """

    granularity: Granularity = "none"
    modules: frozenset[str] = frozenset()
    method: Method = "uniform"
    num_layers: int = 1

    def __post_init__(self) -> None:
        check_choice("recompute granularity", self.granularity, get_args(Granularity))
        check_choice("recompute method", self.method, get_args(Method))
        check_size("recompute num_layers", self.num_layers, low=0 if self.method == "block" else 1)
        unknown = sorted(self.modules - set(MODULES))
        if unknown:
            raise WorkloadError(f"recompute modules {', '.join(unknown)} are unknown; expected of {', '.join(MODULES)}")
        if bool(self.modules) != (self.granularity == "selective"):
            raise WorkloadError(
                f"recompute is {self.granularity} with modules {sorted(self.modules)}; expected modules with selective "
                "and none otherwise"
            )

    @classmethod
    def parse(cls, text: str) -> Recompute:
        """Read ``none``, ``full``, ``selective``, ``sar``, or modules joined by ``+``.

        Raises
        ------
        WorkloadError
            If a name is unknown.
        """
        if text in ("none", "full"):
            return cls("full" if text == "full" else "none")
        return cls("selective", _NAMES.get(text) or frozenset(name.strip() for name in text.split("+")))

    def kept_bytes(self, layers: Sequence[Sequence[Activation]]) -> float:
        """Bytes of one micro-batch that the layers of one chunk keep until their backward pass.

        Parameters
        ----------
        layers : sequence of sequences of Activation
            Tensors of each layer (`activations.layer_activations`), whose first is the layer's input.
        """
        if self.granularity != "full":
            return sum(_size(tensors, self.modules) for tensors in layers)
        inputs = [tensors[0].size_bytes for tensors in layers]
        if self.method == "uniform":
            return sum(inputs[:: self.num_layers])
        whole = (_size(tensors, frozenset()) for tensors in layers[self.num_layers :])
        return sum(inputs[: self.num_layers]) + sum(whole)

    def rebuilt_bytes(self, layers: Sequence[Sequence[Activation]]) -> float:
        """Most bytes that are rebuilt at one time: for one layer, or the layers between two kept inputs."""
        if self.granularity != "full":
            return max((_size(tensors, frozenset()) - _size(tensors, self.modules) for tensors in layers), default=0.0)
        step = self.num_layers if self.method == "uniform" else 1
        inner = layers if self.method == "uniform" else layers[: self.num_layers]
        sizes = [_size(tensors, frozenset()) - tensors[0].size_bytes for tensors in inner]
        return max((sum(sizes[first : first + step]) for first in range(0, len(sizes), step)), default=0.0)


def _size(tensors: Sequence[Activation], modules: frozenset[str]) -> float:
    return sum(tensor.size_bytes for tensor in tensors if tensor.kept(modules))
