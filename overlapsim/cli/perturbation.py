"""Option type of what is perturbed; counts of routed tokens may come from a file."""

from __future__ import annotations

from pathlib import Path

from overlapsim.errors import UsageError
from overlapsim.step.perturb import Perturbation
from overlapsim.workload.routing import read_counts


def perturbation(text: str) -> Perturbation:
    """Parse a perturbation; ``routing=FILE`` stands for the counts recorded in that file.

    Raises
    ------
    UsageError
        If the text is no perturbation, or the file cannot be read (exit code 3 where it holds no counts).
    """
    parts = text.split(",")
    for number, part in enumerate(parts):
        key, _, value = (entry.strip() for entry in part.partition("="))
        if key == "routing" and value.lower().endswith((".csv", ".json")):
            try:
                counts = read_counts(Path(value).read_text(encoding="utf-8"))
            except OSError as problem:
                message = f"routing is {value!r}, which cannot be read ({problem.strerror}); check the path"
                raise UsageError(message) from problem
            except (UnicodeDecodeError, UsageError) as problem:
                raise UsageError(f"routing file {value!r}: {problem}", exit_code=3) from problem
            parts[number] = f"routing={counts}"
    return Perturbation.parse(",".join(parts))
