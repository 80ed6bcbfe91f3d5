"""Layout: the degrees of every kind of parallelism, and the two grids of ranks they span."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from overlapsim.errors import LayoutError

CpKind = Literal["ring", "allgather", "ulysses", "hybrid"]
DEGREES: Final = ("tp", "sp", "cp", "ep", "etp", "pp", "vpp", "dp", "hsdp")
KEYS: Final = ("tp", "sp", "cp", "cp_kind", "ep", "etp", "pp", "vpp", "dp", "zero", "hsdp", "sequence_parallel")
"""Keys of the text form, in the order in which they are printed."""
MAX_RANKS: Final = 2**24
"""Far above any machine (the largest published jobs have about 10^5 GPUs); a larger product is a slip."""
_FLAGS: Final = {True: "on", False: "off"}


@dataclass(frozen=True)
class Layout:
    """Parallel degrees of one training job.

    Attention and dense parts run on the grid ``tp x sp x cp x pp x dp``, experts on the same ranks as
    ``etp x ep x pp x edp``: the expert grid has no sequence axes, its data-parallel degree `edp` follows.

    Attributes
    ----------
    tp : tensor parallelism of attention and dense feed-forward blocks
    sp : Ulysses degree: the sequence is split outside attention, and two exchanges split the heads inside it
    cp : context parallelism: the sequence is split inside attention too
    cp_kind : how attention sees the whole sequence: ``ring`` (keys and values go round), ``allgather`` (they are
        gathered), ``ulysses`` (`sp` alone) or ``hybrid`` (`sp` inside, a ring of `cp` outside). It follows from `sp`
        and `cp` but for the choice between ring and allgather; ``cp=8, cp_kind=ulysses`` is ``sp=8``
    ep : expert parallelism: whole experts are dealt to ranks
    etp : tensor parallelism within each expert; 0 takes `tp`, as Megatron does
    pp, vpp : pipeline stages, and model chunks a stage holds (interleaving)
    dp : data parallelism, ranks that hold the same part of the model and other samples
    zero : what is sharded over data-parallel ranks: 0 nothing, 1 optimizer, 2 and gradients, 3 and parameters
    hsdp : groups of data-parallel ranks of which each holds a whole set of shards; 1: one set over all of them
    sequence_parallel : whether norms and residuals of a tensor-parallel group are split along the sequence;
        means nothing (and is True) with ``tp=1``

    Raises
    ------
    LayoutError
        If a degree is no whole number from 1, the two grids do not agree, or two settings contradict each other.

    Examples
    --------
    >>> layout = Layout(sp=8, ep=8, pp=15, dp=2)
    >>> layout.world_size, layout.edp, layout.cp_kind
    (240, 2, 'ulysses')
    >>> str(Layout(tp=8, pp=12, dp=2, etp=1, ep=4))
    'tp=8,ep=4,etp=1,pp=12,dp=2'
    """

    tp: int = 1
    sp: int = 1
    cp: int = 1
    cp_kind: CpKind = "ring"
    ep: int = 1
    etp: int = 0
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    zero: int = 0
    hsdp: int = 1
    sequence_parallel: bool = True

    def __post_init__(self) -> None:
        self._check_values()
        if self.etp == 0:
            object.__setattr__(self, "etp", self.tp)
        if self.tp == 1:
            object.__setattr__(self, "sequence_parallel", True)
        self._settle_context()
        if self.world_size > MAX_RANKS:
            raise LayoutError(f"{self} has {self.world_size} ranks; expected at most {MAX_RANKS}")
        self._check_grids()

    @property
    def context(self) -> int:
        """Parts in which a sequence is cut before attention: ``sp x cp``."""
        return self.sp * self.cp

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.tp * self.sp * self.cp * self.pp * self.dp

    @property
    def edp(self) -> int:
        """Data-parallel degree of the experts."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def dense_replicas(self) -> int:
        """Ranks that hold the same dense parameters and add up their gradients: ``sp x cp x dp``."""
        return self.sp * self.cp * self.dp

    @property
    def dense_shards(self) -> int:
        """Ranks over which ZeRO shards dense state."""
        return self.dense_replicas // self.hsdp if self.zero else 1

    @property
    def expert_shards(self) -> int:
        """Ranks over which ZeRO shards the experts' state."""
        return self.edp // self.hsdp if self.zero else 1

    @property
    def sequence_split(self) -> int:
        """Parts of a sequence between attention and feed-forward blocks, with tensor-parallel norms split as asked."""
        return self.context * (self.tp if self.sequence_parallel else 1)

    @classmethod
    def parse(cls, text: str, world_size: int | None = None) -> Layout:
        """Read a layout such as ``sp=8,ep=8,pp=15,dp=2``.

        Parameters
        ----------
        text : str
            ``key=value`` pairs of `KEYS`, separated by commas; what is left out keeps its default.
        world_size : int, optional
            Ranks of the machine: they give `dp` where the text does not, and must agree where it does.

        Raises
        ------
        LayoutError
            If a pair is malformed, unknown or twice there, or the layout is impossible (see the class).

        Examples
        --------
        >>> Layout.parse("sp=8,ep=8,pp=15", world_size=1440).dp
        12
        """
        given = _pairs(text)
        if world_size is not None and "dp" not in given:
            model = cls(**{key: given[key] for key in ("tp", "sp", "cp", "cp_kind", "pp") if key in given}).world_size
            if world_size < 1 or world_size % model:
                raise LayoutError(
                    f"{world_size} ranks do not divide into copies of the model on tp x sp x cp x pp = {model} ranks; "
                    f"expected a multiple of {model}, or other degrees than {text!r}"
                )
            given["dp"] = world_size // model
        layout = cls(**given)
        if world_size is not None and layout.world_size != world_size:
            raise LayoutError(
                f"{text!r} has {layout.world_size} ranks (tp x sp x cp x pp x dp); expected {world_size}, "
                "or leave out dp to have it follow"
            )
        return layout

    def __str__(self) -> str:
        """Text that `parse` reads back: `dp` and whatever is not the default."""
        defaults: dict[str, object] = {**dict.fromkeys(DEGREES, 1), "etp": self.tp, "zero": 0, "dp": None}
        defaults |= {"cp_kind": self._default_kind(), "sequence_parallel": True}
        shown = ((key, getattr(self, key)) for key in KEYS)
        return ",".join(
            f"{key}={_FLAGS[value] if isinstance(value, bool) else value}"
            for key, value in shown
            if value != defaults[key]
        )

    def _check_values(self) -> None:
        for name in (*DEGREES, "zero"):
            value = getattr(self, name)
            low, high = 0 if name in ("etp", "zero") else 1, 3 if name == "zero" else MAX_RANKS
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise LayoutError(f"{name} is {value!r}; expected a whole number from {low} to {high}")
        if self.cp_kind not in get_args(CpKind):
            raise LayoutError(f"cp_kind is {self.cp_kind!r}; expected one of {', '.join(get_args(CpKind))}")
        if not isinstance(self.sequence_parallel, bool):
            raise LayoutError(f"sequence_parallel is {self.sequence_parallel!r}; expected true or false")

    def _settle_context(self) -> None:
        """Give one spelling to what can be said in two."""
        if self.cp_kind == "ulysses" and self.cp > 1 and self.sp == 1:
            object.__setattr__(self, "sp", self.cp)
            object.__setattr__(self, "cp", 1)
        if self.cp > 1 and self.cp_kind == "hybrid" and self.sp == 1:
            raise LayoutError(f"cp_kind is hybrid with cp={self.cp} alone; expected sp of at least 2 as well, or ring")
        if self.cp > 1 and self.cp_kind in ("allgather", "ulysses") and self.sp > 1:
            raise LayoutError(
                f"cp_kind is {self.cp_kind} with sp={self.sp} and cp={self.cp}; expected hybrid (or nothing): Ulysses "
                "inside, a ring outside"
            )
        if self.cp == 1 or self.sp > 1:
            object.__setattr__(self, "cp_kind", self._default_kind())

    def _default_kind(self) -> CpKind:
        if self.sp > 1:
            return "hybrid" if self.cp > 1 else "ulysses"
        return "ring"

    def _check_grids(self) -> None:
        experts = self.etp * self.ep * self.pp
        if self.world_size % experts:
            raise LayoutError(
                f"the expert grid etp x ep x pp = {self.etp} x {self.ep} x {self.pp} = {experts} does not divide the "
                f"{self.world_size} ranks (tp x sp x cp x pp x dp); expected degrees that do"
                + (", or etp=1 to keep experts whole" if self.etp == self.tp > 1 else "")
            )
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(f"vpp is {self.vpp} with pp=1; expected pp of at least 2 to interleave, or vpp=1")
        if self.hsdp > 1 and not self.zero:
            raise LayoutError(
                f"hsdp is {self.hsdp} with zero=0; expected zero of 1 to 3, or hsdp=1: nothing is sharded"
            )
        if self.dp % self.hsdp or self.edp % self.hsdp:
            raise LayoutError(
                f"hsdp is {self.hsdp} with dp={self.dp} and edp={self.edp}; expected a divisor of both: "
                "each group holds a whole set of shards"
            )


def _pairs(text: str) -> dict[str, Any]:
    """Values by key, numbers and flags read."""
    found: dict[str, Any] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or key not in KEYS:
            raise LayoutError(f"{pair!r} is no part of a layout; expected key=value with a key of {', '.join(KEYS)}")
        if key in found:
            raise LayoutError(f"{key} is given twice in {text!r}; expected it once")
        found[key] = _value(key, value)
    return found


def _value(key: str, value: str) -> int | str | bool:
    if key == "cp_kind":
        return value
    if key == "sequence_parallel":
        if value not in _FLAGS.values():
            raise LayoutError(f"{key} is {value!r}; expected {' or '.join(_FLAGS.values())}")
        return value == _FLAGS[True]
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise LayoutError(f"{key} is {value!r}; expected a whole number")
    return int(value)
