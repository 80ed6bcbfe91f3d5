"""Frameworks that `install.sh` put into the folder named by OVERLAPSIM_FRAMEWORKS; tests without theirs are skipped."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

HERE: Final = Path(__file__).parent


def folder() -> Path:
    """Where frameworks are; skips the test where there is none."""
    named = os.environ.get("OVERLAPSIM_FRAMEWORKS")
    if not named:
        pytest.skip("OVERLAPSIM_FRAMEWORKS names no folder of frameworks (tests/emit/frameworks/README.md)")
    return Path(named)


def parse(environment: str, script: str, *arguments: object) -> tuple[Any, str]:
    """What a framework's parser makes of a file, and what it says where it refuses (then None)."""
    lines, said = _lines(environment, script, *arguments)
    return (json.loads(lines[-1]) if lines else None), said


def parse_all(environment: str, script: str, *arguments: object) -> tuple[list[Any], str]:
    """What a framework's parser makes of each file, a line each, and what it says where it refuses one (then none)."""
    lines, said = _lines(environment, script, *arguments)
    return [json.loads(line) for line in lines if line.startswith("{")], said


def _lines(environment: str, script: str, *arguments: object) -> tuple[list[str], str]:
    """What a script printed, empty where it failed, and its complaints.

    Parameters
    ----------
    environment : folder below OVERLAPSIM_FRAMEWORKS with a virtual environment
    script : beside this file
    """
    python = folder() / environment / "bin" / "python"
    module = script.partition("_")[0]
    if not _has(python, module):
        pytest.skip(f"{environment} has no {module}")
    done = _run(python, str(HERE / script), *map(str, arguments))
    return ([], done.stderr) if done.returncode else (done.stdout.splitlines(), "")


@functools.cache
def _has(python: Path, module: str) -> bool:
    """Whether a Python has a package, without importing it: that takes seconds."""
    asked = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    return python.exists() and _run(python, "-c", asked).returncode == 0


def _run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "WORLD_SIZE", "RANK")}
    return subprocess.run([str(python), *arguments], capture_output=True, text=True, check=False, env=clean)
