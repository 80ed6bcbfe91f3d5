"""Perturbation: slow ranks, degraded links, jitter and unbalanced experts, as text and as numbers; drawn by a seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapsim.errors import UsageError
from overlapsim.units import whole_number
from overlapsim.workload.routing import UNIFORM, Routing

PLACED: Final = ("slow", "nic", "nvlink")
"""Keys that name a share of a healthy speed and where: a rank's kernels, a node's NICs, a rank's NVLinks."""
KEYS: Final = (*PLACED, "jitter", "imbalance", "routing", "seed")
MOST_JITTER: Final = 1.0
"""Standard deviation of a block's time over its mean; published runs show some percent, and above 1 the draws of a
log-normal have no longer the shape of a delay."""


@dataclass(frozen=True)
class Degraded:
    """One place below its healthy speed.

    Attributes
    ----------
    share : of the healthy speed, in (0, 1]
    place : rank (``slow``, ``nvlink``) or node (``nic``); -1: drawn by the seed
    """

    share: float
    place: int = -1

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UsageError(f"a place runs at {self.share} of its healthy speed; expected a share in (0, 1]")
        if self.place < -1:
            raise UsageError(f"place {self.place} is no rank and no node; expected a number from 0, or none to draw it")

    def __str__(self) -> str:
        """Text that `Perturbation.parse` reads."""
        return f"{self.share:g}" + (f"@{self.place}" if self.place >= 0 else "")


@dataclass(frozen=True)
class Perturbation:
    """What is not as it should be in a step.

    Attributes
    ----------
    slow : ranks whose kernels run at a share of their speed (a throttled or failing GPU)
    nic : nodes whose NICs run at a share of their rate
    nvlink : ranks whose links inside the node run at a share of their rate
    jitter : standard deviation of the time of a rank's block over its mean; a block waits for the slowest of the ranks
        that it communicates with
    imbalance : rows of the fullest expert rank over the even share, from 1
    routing : how tokens spread over experts, instead of that one number (`workload.routing`)
    seed : of what is drawn: places that are not given, and jitter

    Raises
    ------
    UsageError
        If a number is out of range, or imbalance and routing are both given.

    Examples
    --------
    >>> found = Perturbation.parse("slow=0.9@3,jitter=0.05,seed=1")
    >>> found.slow[0].place, found.jitter, str(found)
    (3, 0.05, 'slow=0.9@3,jitter=0.05,seed=1')
    """

    slow: tuple[Degraded, ...] = ()
    nic: tuple[Degraded, ...] = ()
    nvlink: tuple[Degraded, ...] = ()
    jitter: float = 0.0
    imbalance: float = 1.0
    seed: int = 0
    routing: Routing = UNIFORM

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= MOST_JITTER:
            raise UsageError(f"jitter is {self.jitter}; expected a standard deviation from 0 to {MOST_JITTER:g}")
        if not 1 <= self.imbalance < math.inf:
            raise UsageError(f"imbalance is {self.imbalance}; expected a finite number of at least 1")
        if self.imbalance > 1 and not self.routing.even:
            raise UsageError(
                f"imbalance is {self.imbalance:g} and routing {self.routing}; expected one of them: routing says how "
                "full every rank is"
            )
        if self.seed < 0:
            raise UsageError(f"seed is {self.seed}; expected a whole number from 0")

    @classmethod
    def parse(cls, text: str) -> Perturbation:
        """Read ``key=value`` pairs separated by commas; `slow`, `nic` and `nvlink` may stand there several times.

        Raises
        ------
        UsageError
            If a pair is malformed or unknown, or another key is there twice.
        """
        placed: dict[str, list[Degraded]] = {key: [] for key in PLACED}
        numbers: dict[str, float] = {}
        routing: list[Routing] = []
        for pair in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = (part.strip() for part in pair.partition("="))
            if not equals or key not in KEYS:
                raise UsageError(
                    f"{pair!r} is no perturbation; expected key=value with a key of {', '.join(KEYS)}, such as "
                    "slow=0.9@3 (rank 3 at 0.9 of its speed) or jitter=0.05"
                )
            if key in placed:
                placed[key].append(_degraded(key, value))
                continue
            if key in numbers or (key == "routing" and routing):
                raise UsageError(f"{key} is given twice in {text!r}; expected it once")
            if key == "routing":
                routing.append(Routing.parse(value))
                continue
            numbers[key] = _number(key, value)
        seed = numbers.pop("seed", 0.0)
        if seed != int(seed):
            raise UsageError(f"seed is {seed:g}; expected a whole number")
        slow, nic, nvlink = (tuple(placed[key]) for key in PLACED)
        uneven = routing[0] if routing else UNIFORM
        return cls(slow, nic, nvlink, numbers.get("jitter", 0.0), numbers.get("imbalance", 1.0), int(seed), uneven)

    def __str__(self) -> str:
        """Text that `parse` reads back; empty where nothing is perturbed."""
        parts = [f"{key}={entry}" for key in PLACED for entry in getattr(self, key)]
        parts += [f"jitter={self.jitter:g}"] if self.jitter else []
        parts += [f"imbalance={self.imbalance:g}"] if self.imbalance > 1 else []
        parts += [] if self.routing == UNIFORM else [f"routing={self.routing}"]
        return ",".join([*parts, f"seed={self.seed}"] if self.seed else parts)

    def places(self, kind: str, count: int) -> Iterator[Degraded]:
        """Yield what is degraded of a kind of `PLACED`, with every place in 0 .. `count` - 1 settled.

        Raises
        ------
        UsageError
            If a place is beyond the last one.
        """
        draws = np.random.default_rng((self.seed, PLACED.index(kind)))
        for entry in getattr(self, kind):
            drawn = int(draws.integers(count))
            if entry.place >= count:
                what = "nodes" if kind == "nic" else "ranks"
                known = f"the {count} {what} of the layout; expected 0 to {count - 1}"
                raise UsageError(f"{kind}={entry} is beyond {known}")
            yield Degraded(entry.share, drawn if entry.place < 0 else entry.place)


NONE: Final = Perturbation()
"""Nothing is perturbed."""


def jitter_factors(seed: Sequence[int], count: int, jitter: float, ranks: int) -> np.ndarray:
    """Factors of `count` blocks' times: each the largest of `ranks` draws, which have mean 1.

    Log-normal with standard deviation `jitter`; the largest of n uniform draws is the n-th root of one.

    Examples
    --------
    >>> float(jitter_factors([1], 100_000, 0.05, 1).mean().round(3))
    1.0
    """
    from scipy.special import ndtri

    sigma = math.sqrt(math.log1p(jitter**2))
    uniform = np.random.default_rng(seed).random(count) ** (1 / ranks)
    # A draw of exactly 0 or 1 has no finite quantile.
    normal = ndtri(np.clip(uniform, 1e-12, 1 - 1e-12))
    factors: np.ndarray = np.exp(sigma * normal - sigma**2 / 2)
    return factors


def _degraded(key: str, value: str) -> Degraded:
    share, at, place = value.partition("@")
    if not at:
        return Degraded(_number(key, share))
    if (number := whole_number(place)) is None:
        raise UsageError(f"{key} is at {place!r}; expected the number of a rank (a node for nic)")
    return Degraded(_number(key, share), number)


def _number(key: str, value: str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise UsageError(f"{key} is {value!r}; expected a number")
    return found
