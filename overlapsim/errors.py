"""The one error family: every message says what was given, what was expected and what to do."""

from __future__ import annotations


class OverlapSimError(Exception):
    """Base of all errors that a user of overlapsim can cause.

    The command line turns it into one line on stderr and the exit code
    in :attr:`exit_code` (1 no feasible plan, 2 usage, 3 bad profile or data);
    anything else that escapes is a defect of ours.
    """

    exit_code = 2

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code


class UsageError(OverlapSimError):
    """An argument is outside what the command or function accepts."""


class ProfileError(OverlapSimError):
    """A hardware profile or a data file is missing, malformed or contradicts itself."""

    exit_code = 3


class LayoutError(OverlapSimError):
    """A parallel layout does not fit the model or the cluster."""


class WorkloadError(OverlapSimError):
    """A model description or an operator shape is invalid."""


class StrategyError(OverlapSimError):
    """A strategy is unknown, does not apply, or was given parameters it cannot use."""


class PlanError(OverlapSimError):
    """A plan file cannot be read or used, or (``exit_code=1``) no feasible plan exists."""


class ProgramError(OverlapSimError):
    """A program breaks a rule of the engine's contract."""


class DeadlockError(OverlapSimError):
    """A program came to a stop before all its tasks ended."""


class CalibrationError(OverlapSimError):
    """Measured data cannot be turned into a trustworthy fit."""

    exit_code = 3
