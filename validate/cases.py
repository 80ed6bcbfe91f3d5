"""Cases: whole operators run serially and overlapped, numbers first, in turns, with the spread between turns kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
import numpy as np
from overlapsim.validate.budget import Budget
from overlapsim.validate.measure import Sampler, Sampling, Timing
from overlapsim.validate.numerics import Problem
from overlapsim.validate.plans import RunSpec
from overlapsim.validate.runners.catalogue import make_runner

from overlapsim.report.files import write_text
from overlapsim.units import format_time

if TYPE_CHECKING:
    from overlapsim.validate.ranks import Ranks

VERSION: Final = 1
NOISE_BOUND: Final = 0.25
"""Half the distance of the rounds' medians over the median above which a case is marked invalid."""
ROUNDS: Final = 3
"""Turns in which the cases of a shape are timed: their medians differ by what the machine does between them."""


@dataclass(frozen=True)
class Case:
    """One strategy on one shape.

    Attributes
    ----------
    name : of the shape; serial and overlapped cases of a shape share it
    spec : what is run
    predicted_s, low_s, high_s : said before it is run; None without a prediction
    """

    name: str
    spec: RunSpec
    predicted_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None


@dataclass(frozen=True)
class Result:
    """What became of a case.

    Attributes
    ----------
    case : what was run
    timing : over all rounds
    round_medians_s : median of each round
    error_over_tolerance : of the numbers, below 1
    """

    case: Case
    timing: Timing
    round_medians_s: tuple[float, ...]
    error_over_tolerance: float

    @property
    def noise(self) -> float:
        """Half the distance of the round medians over the median: what a repeat of the case would differ by."""
        if len(self.round_medians_s) < 2:
            return self.timing.noise
        return (max(self.round_medians_s) - min(self.round_medians_s)) / 2 / self.timing.median_s

    @property
    def valid(self) -> bool:
        """Whether rounds agree within the bound and nobody else used the machine."""
        return self.noise <= NOISE_BOUND and replace(self.timing, p10_s=1.0, p90_s=1.0, median_s=1.0).valid

    def to_dict(self) -> dict[str, Any]:
        """Builtins, for JSON."""
        spec = self.case.spec
        return {
            "case": self.case.name,
            "strategy": spec.strategy,
            "parameters": msgspec.to_builtins(spec.parameters),
            "collective": spec.collective,
            "ranks": spec.ranks,
            "m": spec.m,
            "n": spec.n,
            "k": spec.k,
            "dtype": spec.dtype,
            "size_bytes": spec.size_bytes,
            "predicted_s": self.case.predicted_s,
            "low_s": self.case.low_s,
            "high_s": self.case.high_s,
            "measured_s": self.timing.median_s,
            "p10_s": self.timing.p10_s,
            "p90_s": self.timing.p90_s,
            "repeats": self.timing.repeats,
            "round_medians_s": list(self.round_medians_s),
            "noise": self.noise,
            "valid": self.valid,
            "error_over_tolerance": self.error_over_tolerance,
        }


def serial_of(spec: RunSpec) -> RunSpec:
    """The same shape without overlap."""
    settings = {"kernel": "vendor", "method": "serial"}
    return replace(spec, strategy="serial", parameters={}, settings=settings, reorder=None, findings=())


def run_cases(
    ranks: Ranks,
    cases: Sequence[Case],
    *,
    time_budget: float,
    sampling: Sampling,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> list[Result]:
    """Check the numbers of every case, then time them in turns.

    The cases of one shape are timed one after another in every round, so that a machine that gets slower or faster
    meanwhile does not decide which of them looks better. The time budget ends the rounds, never a shape's turn.

    Parameters
    ----------
    cases : in order; those of one shape together
    sampling : of each round
    rounds : turns
    seed : of the data

    Raises
    ------
    NumericsError
        If a case gives wrong numbers.
    """
    budget = Budget(time_budget)
    budget.announce(f"{len(cases)} cases in {rounds} rounds on {ranks.size} ranks ({ranks.backend})", ranks.is_first)
    sampler = Sampler(ranks, sampling)
    results = []
    shapes = dict.fromkeys(case.name for case in cases)
    for number, name in enumerate(shapes):
        if _over(ranks, budget):
            budget.tell(f"left out, the time budget is used up: {name} and what follows", ranks.is_first)
            break
        results += _run_shape(sampler, [case for case in cases if case.name == name], rounds, seed + number, budget)
    return results


def _run_shape(sampler: Sampler, cases: Sequence[Case], rounds: int, seed: int, budget: Budget) -> list[Result]:
    ranks = sampler.ranks
    runners, errors = [], []
    for case in cases:
        what = f"{case.spec.strategy} {case.name}"
        problem = Problem(case.spec, ranks.rank, ranks.device, seed)
        runner = make_runner(problem)
        with ranks.guarded(f"numbers of {what}"):
            first = runner.verify(what)
            # Other data through the same buffers: what is left over from before would show.
            problem.refresh(seed + 1009)
            again = runner.verify(what)
        runners.append(runner)
        errors.append(ranks.largest([max(first, again)])[0])
    timings: list[list[Timing]] = [[] for _ in cases]
    for number in range(rounds):
        if number and _over(ranks, budget):
            break
        for place, (case, runner) in enumerate(zip(cases, runners, strict=True)):
            what = f"{case.spec.strategy} {case.name}"
            timings[place].append(sampler.time(runner.run, what))
            with ranks.guarded(what):
                runner.settle()
    results = []
    for case, error, rounds_of in zip(cases, errors, timings, strict=True):
        result = Result(case, _merged(rounds_of), tuple(timing.median_s for timing in rounds_of), error)
        results.append(result)
        mark = "" if result.valid else ", not valid: too noisy or disturbed"
        told = format_time(result.timing.median_s)
        budget.tell(f"{case.name} {case.spec.strategy}: {told} +-{result.noise:.0%}{mark}", ranks.is_first)
    return results


def _merged(timings: Sequence[Timing]) -> Timing:
    """One timing of several rounds: the median of the medians, percentiles averaged."""
    return Timing(
        median_s=float(np.median([timing.median_s for timing in timings])),
        p10_s=float(np.mean([timing.p10_s for timing in timings])),
        p90_s=float(np.mean([timing.p90_s for timing in timings])),
        repeats=sum(timing.repeats for timing in timings),
        others=float(np.mean([timing.others for timing in timings])),
        clock_hz=timings[-1].clock_hz,
        throttled=any(timing.throttled for timing in timings),
    )


def _over(ranks: Ranks, budget: Budget) -> bool:
    """Whether rank 0's clock says stop; one clock decides for all."""
    return bool(ranks.largest([float(budget.left_s <= 0 and ranks.is_first)])[0])


def write_cases(results: Sequence[Result], path: Path, ranks: Ranks) -> None:
    """Write cases as JSON: ``overlapsim_cases``, where they were run, and one entry a case.

    Raises
    ------
    UsageError
        If the file cannot be written.
    """
    from overlapsim.validate.output import header_of

    content = {
        "overlapsim_cases": VERSION,
        "header": msgspec.to_builtins(header_of(ranks)),
        "nodes": ranks.num_nodes,
        "cases": [result.to_dict() for result in results],
    }
    write_text(path, json.dumps(content, indent=2) + "\n")


def cases_table(results: Sequence[Result]) -> None:
    """Print cases, each against the serial run of its shape."""
    from rich.table import Table

    from overlapsim.cli.output import console

    serial = {result.case.name: result.timing.median_s for result in results if result.case.spec.strategy == "serial"}
    table = Table(title="times of the slowest rank; speed-up over serial execution of the same shape")
    for column in ("case", "strategy", "predicted", "measured", "error", "noise", "speed-up", "valid"):
        table.add_column(column)
    for result in results:
        predicted, measured = result.case.predicted_s, result.timing.median_s
        base = serial.get(result.case.name)
        table.add_row(
            result.case.name,
            result.case.spec.strategy,
            "-" if predicted is None else format_time(predicted),
            format_time(measured),
            "-" if predicted is None else f"{predicted / measured - 1:+.1%}",
            f"{result.noise:.1%}",
            "-" if base is None else f"{base / measured:.3f}",
            "yes" if result.valid else "no",
        )
    console(130).print(table)
    if any(result.case.predicted_s is not None for result in results):
        click.echo("error: predicted over measured, minus one")
