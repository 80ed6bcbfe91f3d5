"""Which ranks form each group of a layout: strides of the two grids by the order in which degrees fill the ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Final, Literal, get_args

from overlapsim.errors import LayoutError
from overlapsim.workload.layout import Layout

DenseKind = Literal["tp", "sp", "cp", "dp", "dp_cp", "shard", "replica"]
ExpertKind = Literal["etp", "ep", "etp_ep", "edp", "expert_shard", "expert_replica"]
GroupKind = Literal[DenseKind, ExpertKind, "pp", "embedding"]
GROUP_KINDS: Final[tuple[GroupKind, ...]] = get_args(GroupKind)
"""``dp_cp`` adds up dense gradients (sp, cp and dp), in HSDP as ``shard`` (ranks with different shards) and
``replica`` (ranks with the same); ``etp_ep`` holds one set of experts; ``embedding`` is the first and the last stage of
a pipeline, which share a tied embedding."""
_EXPERT_KINDS: Final = frozenset(get_args(ExpertKind))
ORDER: Final = ("tp", "sp", "cp", "ep", "dp", "pp")
"""Megatron's order, the first varying fastest: tp-cp-ep-dp-pp; Ulysses stands beside tp."""
_AXES: Final[Mapping[GroupKind, frozenset[str]]] = {
    **{kind: frozenset({kind}) for kind in ("tp", "sp", "cp", "ep", "pp", "replica")},
    "dp": frozenset({"dp", "replica"}),
    "dp_cp": frozenset({"sp", "cp", "dp", "replica"}),
    "shard": frozenset({"sp", "cp", "dp"}),
    "etp": frozenset({"tp"}),
    "etp_ep": frozenset({"tp", "ep"}),
    "edp": frozenset({"dp", "replica"}),
    "expert_shard": frozenset({"dp"}),
    "expert_replica": frozenset({"replica"}),
    "embedding": frozenset({"pp"}),
}

Axis = tuple[int, int]
"""Stride and size."""


@dataclass(frozen=True)
class RankMap:
    """Groups of a layout's ranks.

    A rank's coordinates are digits of its number: in `order` from the fastest, with the layout's degrees as bases.
    The expert grid takes the same order with `etp`, `ep` and `edp` in the places of tp, ep and dp, and no sp or cp.

    Attributes
    ----------
    layout : degrees
    order : names of `ORDER`, the fastest first; see `read_order` for text

    Raises
    ------
    LayoutError
        If the order is none of these names, or the pipelines of the two grids would differ (pp before dp, and edp
        other than dp).

    Examples
    --------
    >>> ranks = RankMap(Layout(tp=2, pp=2, dp=2))
    >>> ranks.group("dp"), ranks.group("pp", 3), ranks.count("tp")
    ((0, 2), (3, 7), 4)
    """

    layout: Layout
    order: tuple[str, ...] = ORDER

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(ORDER):
            raise LayoutError(f"rank order is {'-'.join(self.order)}; expected each of {', '.join(ORDER)} once")
        if self.grid("tp")["pp"] != self.grid("etp")["pp"]:
            raise LayoutError(
                f"in the order {'-'.join(self.order)} the pipelines of {self.layout} and of its experts differ; "
                f"expected pp last, or edp ({self.layout.edp}) equal to dp ({self.layout.dp})"
            )

    def grid(self, kind: GroupKind) -> Mapping[str, Axis]:
        """Stride and size of each axis of the grid that a kind of group lies in, the fastest first.

        Axes have the names of `ORDER`; ``dp`` holds different shards, and ``replica`` beyond it the same (HSDP).

        Raises
        ------
        LayoutError
            If the kind is unknown.
        """
        if kind not in GROUP_KINDS:
            raise LayoutError(f"group kind {kind!r} is unknown; expected one of {', '.join(GROUP_KINDS)}")
        return _grid(self.layout, self.order, kind in _EXPERT_KINDS)

    def size(self, kind: GroupKind) -> int:
        """Ranks of one group."""
        size = 1
        for _, count in self.axes(kind):
            size *= count
        return size

    def count(self, kind: GroupKind) -> int:
        """Groups of this kind in the job."""
        return self.layout.world_size // (self.layout.pp if kind == "embedding" else self.size(kind))

    def group(self, kind: GroupKind, rank: int = 0) -> tuple[int, ...]:
        """Ranks of a rank's group, rising; for a middle stage's rank the embedding group of its pipeline.

        Raises
        ------
        LayoutError
            If there is no such rank.
        """
        if not 0 <= rank < self.layout.world_size:
            raise LayoutError(f"rank {rank} is not in the layout; expected 0 to {self.layout.world_size - 1}")
        base = self.base(kind, rank)
        steps = product(*(range(0, stride * size, stride) for stride, size in reversed(self.axes(kind))))
        return tuple(base + sum(step) for step in steps)

    def base(self, kind: GroupKind, rank: int) -> int:
        """Lowest rank of a rank's group."""
        axes = self.axes("pp" if kind == "embedding" else kind)
        return rank - sum(rank // stride % size * stride for stride, size in axes)

    def holds(self, kind: GroupKind, rank: int) -> bool:
        """Whether a rank is a member of a group of this kind: all are but for middle stages (embedding)."""
        stride, size = self.grid("pp")["pp"]
        return kind != "embedding" or rank // stride % size in (0, size - 1)

    def axes(self, kind: GroupKind) -> tuple[Axis, ...]:
        """Strides and sizes that a group spans, the fastest first."""
        grid = self.grid(kind)
        if kind == "embedding":
            stride, size = grid["pp"]
            return ((max(1, stride * (size - 1)), min(size, 2)),)
        return tuple(axis for name, axis in grid.items() if name in _AXES[kind])

    def others(self, kind: GroupKind) -> tuple[Axis, ...]:
        """Strides and sizes that tell groups of one kind from each other."""
        return tuple(axis for name, axis in self.grid(kind).items() if name not in _AXES[kind])


@functools.lru_cache(maxsize=64)
def _grid(layout: Layout, order: tuple[str, ...], expert: bool) -> Mapping[str, Axis]:
    at = layout
    sizes = {"tp": at.tp, "sp": at.sp, "cp": at.cp, "ep": 1, "dp": at.dp, "pp": at.pp}
    if expert:
        sizes |= {"tp": at.etp, "sp": 1, "cp": 1, "ep": at.ep, "dp": at.edp}
    found: dict[str, Axis] = {}
    stride = 1
    for name in order:
        inner = sizes[name] // (layout.hsdp if name == "dp" else 1)
        found[name] = (stride, inner)
        if name == "dp":
            found["replica"] = (stride * inner, layout.hsdp)
        stride *= sizes[name]
    return MappingProxyType(found)


def read_order(text: str) -> tuple[str, ...]:
    """Rank order of a text such as Megatron's ``tp-cp-ep-dp-pp``, the fastest first; sp goes before cp if left out.

    Raises
    ------
    LayoutError
        If the text is no permutation of these names.

    Examples
    --------
    >>> read_order("tp-cp-ep-pp-dp")
    ('tp', 'sp', 'cp', 'ep', 'pp', 'dp')
    """
    names = tuple(name.strip() for name in text.split("-"))
    if "sp" not in names and "cp" in names:
        place = names.index("cp")
        names = (*names[:place], "sp", *names[place:])
    if sorted(names) != sorted(ORDER):
        raise LayoutError(f"rank order is {text!r}; expected tp-cp-ep-dp-pp in any order, sp as well if it has a place")
    return names
