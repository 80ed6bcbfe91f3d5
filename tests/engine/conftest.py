"""Prints, at the end of a session, what the slow tests reached: features of random programs, mutants caught."""

from __future__ import annotations

from collections import Counter
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Add up what the slow tests recorded; reports bring it here from every worker process."""
    programs = 0
    counts: Counter[str] = Counter()
    caught: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "random programs":
                programs += value
            elif name == "random program counts":
                counts.update(value)
            elif name == "mutation caught by":
                caught[value] += 1
    if programs:
        terminalreporter.section(f"{programs} random programs: how many had")
        _write(terminalreporter, counts, programs)
    if caught:
        terminalreporter.section(f"{caught.total()} mutations: first caught by")
        _write(terminalreporter, caught, caught.total())


def _write(terminalreporter: Any, counts: Counter[str], total: int) -> None:
    width = max(len(name) for name in counts)
    for name, count in counts.most_common():
        terminalreporter.write_line(f"{name:{width}} {count:6d} {count / total:7.1%}")
