"""Prints, at the end of a session, what the random programs of the slow agreement test contained."""

from __future__ import annotations

from collections import Counter
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Sum the counts that test_agree_on_many recorded; reports carry them here from every worker process."""
    programs, counts = 0, Counter()
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "random programs":
                programs += value
            elif name == "random program counts":
                counts.update(value)
    if programs:
        terminalreporter.section(f"{programs} random programs: how many had")
        width = max(len(name) for name in counts)
        for name, count in counts.most_common():
            terminalreporter.write_line(f"{name:{width}} {count:6d} {count / programs:7.1%}")
