"""Dispatchers: how a framework brings tokens to their experts, and the numbers of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, Literal, get_args

from overlapsim.errors import WorkloadError
from overlapsim.units import whole_number
from overlapsim.workload.model import MoE, check_choice, check_flags, check_size, shown
from overlapsim.workload.routes import DEFAULT_SMS, Route, RouteMethod
from overlapsim.workload.routing import Unit

Dispatcher = Literal[
    "all_to_all", "all_gather", "hierarchical", "deepep", "deepep_v2", "deepep_low_latency", "hybrid_ep"
]
DISPATCHERS: Final[tuple[Dispatcher, ...]] = get_args(Dispatcher)
_METHODS: Final[Mapping[str, RouteMethod]] = {
    "hierarchical": "hierarchical",
    "deepep": "deepep",
    "deepep_v2": "deepep_v2",
    "deepep_low_latency": "low_latency",
    "hybrid_ep": "hybrid_ep",
}

_OWN: Final = {"sms": "a dispatcher has its own number", "node_limit": "the model's router has its own limit, or none"}


@dataclass(frozen=True)
class DispatchOptions:
    """Numbers of a dispatcher, and what is done about experts that get too many tokens.

    Attributes
    ----------
    node_limit : nodes that a token reaches at most; 0: the groups that the model's router allows, else no limit
    dtype : type in which tokens go to their experts in the forward pass (``fp8``, with a scale for each 128 elements);
        results and gradients keep the model's. Empty: the model's. Changes results
    sms : SMs that the dispatcher's kernels hold; 0: their own number (`routes.DEFAULT_SMS`)
    capacity : what the model's capacity factor is counted over: each ``expert``, or the experts of a ``device``
        together (MegaScale-MoE)
    balanced : an auxiliary loss over the experts of each GPU has made the GPUs' shares even

    Raises
    ------
    WorkloadError
        If a value is unknown or out of range.
    """

    node_limit: int = 0
    dtype: str = ""
    sms: int = 0
    capacity: Unit = "expert"
    balanced: bool = False

    def __post_init__(self) -> None:
        check_size("node_limit", self.node_limit, low=0)
        check_size("sms", self.sms, low=0)
        if self.dtype not in ("", "fp8"):
            raise WorkloadError(f"dtype is {shown(self.dtype)}; expected fp8, or none for the model's type")
        check_choice("capacity", self.capacity, get_args(Unit))
        check_flags(self, "balanced")


def parse_dispatch(text: str) -> tuple[Dispatcher, DispatchOptions]:
    """Read ``NAME[:KEY=VALUE,..]`` with the keys of `DispatchOptions`.

    Raises
    ------
    WorkloadError
        If the dispatcher, a key or a value is unknown.

    Examples
    --------
    >>> parse_dispatch("deepep:node_limit=4,dtype=fp8")
    ('deepep', DispatchOptions(node_limit=4, dtype='fp8', sms=0, capacity='expert', balanced=False))
    """
    name, _, rest = text.partition(":")
    name, values = name.strip(), dict[str, object]()
    check_choice("dispatcher", name, DISPATCHERS)
    keys = [field.name for field in fields(DispatchOptions)]
    for pair in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or key not in keys or key in values:
            raise WorkloadError(f"{pair!r} in dispatch {text!r}; expected key=value, each of {', '.join(keys)} once")
        if key in ("node_limit", "sms"):
            values[key] = value if (number := whole_number(value)) is None else number
            if number == 0:
                own = f"expected at least 1, or leave {key} out: {_OWN[key]}"
                raise WorkloadError(f"{key} is 0 in dispatch {text!r}; {own}")
        else:
            values[key] = {"true": True, "false": False}.get(value, value) if key == "balanced" else value
    return name, DispatchOptions(**values)  # type: ignore[return-value, arg-type]


def route_of(dispatcher: Dispatcher, options: DispatchOptions, moe: MoE) -> Route | None:
    """Way that a dispatcher's tokens take; None where the library's collectives move them."""
    method = _METHODS.get(dispatcher)
    if method is None:
        return None
    limit = options.node_limit or (moe.top_groups if moe.top_groups < moe.num_groups else 0)
    return Route(method, moe.top_k, moe.num_experts, limit, options.sms or DEFAULT_SMS[method])
