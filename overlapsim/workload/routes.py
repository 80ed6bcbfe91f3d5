"""Route: how routed tokens travel between nodes and inside them, and how many copies of a token each way carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from overlapsim.errors import WorkloadError

RouteMethod = Literal["hierarchical", "deepep", "deepep_v2", "low_latency", "hybrid_ep"]
"""``hierarchical``: an exchange between the GPUs of one index on all nodes, then one inside the node. ``deepep``,
``deepep_v2``: the same way in one pipelined kernel on reserved SMs, of the first and the second generation.
``low_latency``: every copy straight to its rank by RDMA. ``hybrid_ep``: such a kernel inside an NVLink domain."""
DEFAULT_SMS: Final[Mapping[RouteMethod, int]] = {
    "hierarchical": 0,
    "deepep": 24,
    "deepep_v2": 6,
    "low_latency": 0,
    "hybrid_ep": 16,
}
"""SMs that the kernels hold where nothing is said (hwprofiles/SOURCES.md, DEEPEP: 24, and 6 to 12 across nodes in
the second version; 16 is HybridEP's default); 0: the library's number, or none in flight."""


@dataclass(frozen=True)
class Route:
    """The way of an exchange of routed tokens that no plain all-to-all makes.

    Attributes
    ----------
    method : see `RouteMethod`
    top_k, experts : copies of a token, all to different experts of so many
    node_limit : nodes that a token reaches at most; 0: no limit
    sms : SMs that its kernels hold; 0: the library's number (``hierarchical``), none (``low_latency``)

    Raises
    ------
    WorkloadError
        If a number is out of range.

    Examples
    --------
    Eight of 256 experts on 8 nodes, at most 4 of them, are on 3.6 nodes and 7.4 GPUs:

    >>> route = Route("deepep", 8, 256, 4)
    >>> round(route.nodes_of_token(8), 1), round(route.ranks_of_token(64, 8), 1)
    (3.6, 7.4)
    """

    method: RouteMethod
    top_k: int
    experts: int
    node_limit: int = 0
    sms: int = 0

    def __post_init__(self) -> None:
        if self.method not in get_args(RouteMethod):
            raise WorkloadError(f"route {self.method!r} is unknown; expected one of {', '.join(get_args(RouteMethod))}")
        if not 1 <= self.top_k <= self.experts:
            raise WorkloadError(f"a route of {self.top_k} copies to {self.experts} experts; expected 1 to all of them")
        if self.node_limit < 0 or self.sms < 0:
            raise WorkloadError(
                f"a route has node_limit {self.node_limit} and {self.sms} SMs; expected numbers from 0 (no limit, none)"
            )

    def nodes_of_token(self, nodes: int) -> float:
        """Different nodes that a token goes to on average, its own among them; experts are picked evenly."""
        allowed = self._allowed(nodes)
        return distinct(allowed, self.experts * allowed / nodes, self.top_k)

    def ranks_of_token(self, ranks: int, nodes: int) -> float:
        """Different ranks that a token goes to on average, its own among them."""
        allowed = self._allowed(nodes)
        return distinct(ranks * allowed / nodes, self.experts * allowed / nodes, self.top_k)

    def _allowed(self, nodes: int) -> int:
        return min(nodes, self.node_limit) if self.node_limit else nodes


def distinct(bins: float, experts: float, picks: int) -> float:
    """Expected number of bins hit by `picks` different ones of `experts`, which lie evenly in the bins.

    ``bins (1 - prod_i (1 - (experts / bins) / (experts - i)))``, the share of draws without return that miss a bin.

    Examples
    --------
    >>> distinct(2, 8, 1), distinct(4, 4, 4), distinct(1, 8, 2)
    (1.0, 4.0, 1.0)
    """
    missed = 1.0
    for drawn in range(picks):
        left = experts - drawn
        missed *= max(0.0, 1 - experts / bins / left) if left > 0 else 0.0
    return bins * (1 - missed)
