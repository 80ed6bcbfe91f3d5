"""Ranks on this machine for commands that were not started by torchrun: torchrun itself, its own noise left out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

import click
from overlapsim.validate.ranks import RankError

from overlapsim.errors import UsageError

# torchrun's log lines, its summary of failed children with the traceback above it, and c10d's C++ frames.
_NOISE: Final = re.compile(r"^\[?[WEI]\d{4} |^W\d{4} ")
_SUMMARY: Final = ("Traceback (most recent call last):", "=====", "-----")


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def run_ranks(arguments: Sequence[str], ranks: int) -> None:
    """Run a command of ``overlapsim.validate`` on several ranks of this machine and wait for it.

    Parameters
    ----------
    arguments : of the command, without ``--ranks``
    ranks : processes

    Raises
    ------
    RankError
        If a rank failed: with the last error that a rank told.
    UsageError
        If the number of ranks is below 1.
    """
    if ranks < 1:
        raise UsageError(f"--ranks is {ranks}; expected at least 1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "overlapsim.validate", "--", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    errors, quiet = list[str](), False
    for line in process.stderr:
        text = line.rstrip()
        if text.startswith("error: "):
            errors.append(text.removeprefix("error: "))
            continue
        # Behind the first error comes torchrun's account of who ended how: ours says more.
        quiet = quiet or (bool(errors) and text.startswith(_SUMMARY))
        if text and not quiet and not _NOISE.match(text):
            click.echo(text, err=True)
    if process.wait():
        raise RankError(_most_telling(errors) or f"the ranks ended with exit code {process.returncode}")


def _most_telling(errors: Sequence[str]) -> str | None:
    """Of what several ranks tell, the one that fails for a reason of its own, else the first."""
    own = [text for text in errors if not re.search(r"\(rank \d+ (was in|waited at) ", text)]
    return next(iter([*own, *errors]), None)
