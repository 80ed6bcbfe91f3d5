"""What a check of an existing config says, and the contract of whoever checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from overlapsim.emit.base import Reading
from overlapsim.emit.rules import Version, settle
from overlapsim.plan import Finding

LintKind = Literal["unknown", "conflict", "no_effect", "missing", "gain"]
"""A setting nobody reads; two that do not go together (or that the framework refuses); one that does nothing here;
overlap that is not asked for; what the planner would change."""


@dataclass(frozen=True)
class Lint:
    """One thing to say about a config.

    Attributes
    ----------
    kind : what it is
    line : of the file, from 1; None where it is about the whole
    message : what is there and why it matters
    fix : what to write instead
    trial : what the fix changes of `Reading.settings`, where the step can be predicted with it
    """

    kind: LintKind
    line: int | None
    message: str
    fix: str
    trial: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Checked:
    """The answer of a linter.

    Attributes
    ----------
    lints : in the order of the file, the whole first
    reading : what the config says in neutral terms; None where its degrees make no layout
    findings : what was believed: a version that is not known, say
    """

    lints: tuple[Lint, ...]
    reading: Reading | None = None
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What is known of a run beside its config; None is "not said", and no rule looks at it.

    Attributes
    ----------
    world_size : ranks of the job
    architecture : of the GPUs, as in device profiles
    """

    world_size: int | None = None
    architecture: str | None = None


class Linter(ABC):
    """One framework's configs.

    Attributes
    ----------
    name : by which `emit --as` calls it
    framework : whose versions it follows, a key of `rules.FRAMEWORKS`
    """

    name: ClassVar[str]
    framework: ClassVar[str]

    @abstractmethod
    def recognises(self, file_name: str, text: str) -> bool:
        """Whether a file is one of the framework's."""

    def lint(self, text: str, facts: Facts, version: str | None = None) -> Checked:
        """Check a config.

        Parameters
        ----------
        text : of the config
        facts : what is known beside it
        version : of the framework; None: the newest that is known

        Raises
        ------
        UsageError
            If the text cannot be read as a config of the framework, or the version is not a version.
        """
        settled, findings = settle(self.framework, version)
        checked = self.check(text, facts, settled)
        ordered = sorted(dict.fromkeys(checked.lints), key=lambda lint: lint.line or 0)
        return replace(checked, lints=tuple(ordered), findings=(*findings, *checked.findings))

    @abstractmethod
    def check(self, text: str, facts: Facts, version: Version) -> Checked:
        """Check a config by the rules of a version that is known; a pure function."""
