"""Versions of frameworks and the rules on their flags: since when, until when, spelt how, with which value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import total_ordering
from typing import Final, Literal

from overlapsim.errors import UsageError
from overlapsim.plan import Finding

Form = Literal["switch", "value", "list"]
"""A flag alone, a flag with one value, a flag with some."""
Scalar = str | int | float | bool


@total_ordering
@dataclass(frozen=True)
class Version:
    """A version by its numbers; ``0.19`` is ``0.19.0``.

    Examples
    --------
    >>> Version.parse("core_v0.19.2") > Version.parse("0.9")
    True
    >>> str(Version.parse("v2.18"))
    '2.18'
    """

    numbers: tuple[int, ...]
    text: str = field(default="", compare=False)

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read ``0.19.2``, ``v2.18`` or ``core_v0.19.0``; what follows the numbers (``rc1``, ``.dev0``) is left out.

        Raises
        ------
        UsageError
            If there are no numbers.
        """
        found = re.fullmatch(r"(?:[a-z]+_)?v?(\d{1,6}(?:\.\d{1,6}){0,3})(?:[.+-]?[a-z].*)?", text.strip())
        if found is None:
            raise UsageError(f"version is {text!r}; expected numbers such as 0.19.2")
        numbers = tuple(int(part) for part in found[1].split("."))
        while len(numbers) > 1 and numbers[-1] == 0:
            numbers = numbers[:-1]
        return cls(numbers, found[1])

    def __lt__(self, other: Version) -> bool:
        """Compare number by number; trailing zeros are dropped when read."""
        return self.numbers < other.numbers

    def __str__(self) -> str:
        """Return the text that was read."""
        return self.text or ".".join(map(str, self.numbers))


@dataclass(frozen=True)
class Known:
    """What is known of a framework's versions.

    Attributes
    ----------
    title : for people
    oldest, newest : between which the rules hold
    """

    title: str
    oldest: str
    newest: str


FRAMEWORKS: Final[Mapping[str, Known]] = {
    "megatron": Known("Megatron-Core", "0.13", "0.19.2"),
    "transformer_engine": Known("Transformer Engine", "1.11", "2.18"),
    "megatron_bridge": Known("Megatron Bridge", "0.3.1", "0.6.2"),
    "torchtitan": Known("torchtitan", "0.2.2", "0.3.0"),
    "pytorch": Known("PyTorch", "2.6", "2.13"),
    "deepspeed": Known("DeepSpeed", "0.19.8", "0.19.8"),
    "nccl": Known("NCCL", "2.28.3", "2.30.7"),
    "vllm": Known("vLLM", "0.33.0", "0.33.0"),
    "sglang": Known("SGLang", "0.5.23", "0.5.23"),
    "overlapsim": Known("overlapsim.validate", "0.1", "0.1"),
}
"""Versions whose sources or parsers were looked at, August 2026."""


def framework(name: str) -> Known:
    """Versions of one framework.

    Raises
    ------
    UsageError
        If it is unknown.
    """
    if name not in FRAMEWORKS:
        raise UsageError(f"framework {name!r} is unknown; expected one of {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[name]


def settle(name: str, version: str | None) -> tuple[Version, tuple[Finding, ...]]:
    """Return the version whose rules are used, and findings where it is not the one asked for.

    Parameters
    ----------
    name : of the framework
    version : that is asked for; None: the newest known

    Raises
    ------
    UsageError
        If the framework is unknown or the version is not a version.

    Examples
    --------
    >>> settle("megatron", None)[0].text
    '0.19.2'
    >>> version, findings = settle("megatron", "0.9")
    >>> str(version), findings[0].code
    ('0.13', 'framework_version_stale')
    """
    known = framework(name)
    oldest, newest = Version.parse(known.oldest), Version.parse(known.newest)
    if version is None:
        return newest, ()
    asked = Version.parse(version)
    if oldest <= asked <= newest:
        return asked, ()
    used, code = (oldest, "framework_version_stale") if asked < oldest else (newest, "framework_version_unknown")
    message = (
        f"{known.title} {asked} was not looked at: rules are known from {oldest} to {newest}, and those of {used} are "
        f"used; hold every setting against what {asked} accepts before a run"
    )
    return used, (Finding(code, message),)


@dataclass(frozen=True)
class Flag:
    """One setting of a framework.

    Attributes
    ----------
    spelling : as the framework reads it
    form : whether it takes values
    since, until : first version that has it, first that has it no more; empty: all that are known
    choices : values it takes; empty: any. ``name@0.14`` came with a version, ``name@0.13:0.16`` went again with another
    before : spelling in versions before `since`; empty: there is none
    """

    spelling: str
    form: Form = "value"
    since: str = ""
    until: str = ""
    choices: tuple[str, ...] = ()
    before: str = ""

    def takes(self, version: Version) -> tuple[str, ...]:
        """Values that a version takes; empty: any.

        Examples
        --------
        >>> Flag("--format", choices=("torch", "zarr@:0.16", "fsdp@0.14")).takes(Version.parse("0.13"))
        ('torch', 'zarr')
        """
        found = []
        for choice in self.choices:
            value, _, span = choice.partition("@")
            since, _, until = span.partition(":")
            if (not since or version >= Version.parse(since)) and (not until or version < Version.parse(until)):
                found.append(value)
        return tuple(found)

    def spelt(self, version: Version) -> str | None:
        """Spelling in a version, or None where the version does not have it."""
        if self.since and version < Version.parse(self.since):
            return self.before or None
        if self.until and version >= Version.parse(self.until):
            return None
        return self.spelling


@dataclass(frozen=True)
class Sheet:
    """Settings collected for one version: what it has goes on the sheet, what it has not is said.

    Attributes
    ----------
    title : of the framework, for sentences
    flags : the framework's table, by neutral name
    version : for which is written
    """

    title: str
    flags: Mapping[str, Flag]
    version: Version
    lines: list[tuple[str, tuple[Scalar, ...]]] = field(default_factory=list)
    unexpressed: list[str] = field(default_factory=list)

    def set(self, name: str, *values: Scalar, why: str = "") -> bool:
        """Put one setting down; False (and a sentence) where the version does not have it.

        Parameters
        ----------
        name : key of the table
        *values : none for a switch
        why : what is lost without it, for the sentence
        """
        flag = self.flags[name]
        assert (flag.form == "switch") == (not values), f"{name} is a {flag.form}"
        known = [choice.partition("@")[0] for choice in flag.choices]
        assert not known or all(str(value) in known for value in values), f"{name} takes {known}"
        spelling = flag.spelt(self.version)
        if spelling is None:
            when = f"it came with {flag.since}" if flag.since and self.version < Version.parse(flag.since) else "gone"
            lost = f": {why}" if why else ""
            self.unexpressed.append(f"{self.title} {self.version} has no {flag.spelling} ({when}){lost}")
            return False
        late = [str(value) for value in values if known and str(value) not in flag.takes(self.version)]
        if late:
            lost = f": {why}" if why else ""
            self.unsaid(f"{self.title} {self.version} has no {', '.join(late)} for {spelling}{lost}")
            return False
        self.lines.append((spelling, values))
        return True

    def unsaid(self, sentence: str) -> None:
        """Say what the framework cannot be told, once."""
        if sentence not in self.unexpressed:
            self.unexpressed.append(sentence)


def spelt(flags: Mapping[str, Flag], version: Version) -> Mapping[str, str]:
    """Neutral name by spelling, of all that a version has."""
    return {spelling: name for name, flag in flags.items() if (spelling := flag.spelt(version)) is not None}


def words(values: Sequence[Scalar]) -> str:
    """Values as text on a command line: whole floats without a point, flags as 1 and 0.

    Examples
    --------
    >>> words([4e7, True, "p2p"])
    '40000000 1 p2p'
    """
    return " ".join(
        str(int(value)) if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()) else str(value)
        for value in values
    )
