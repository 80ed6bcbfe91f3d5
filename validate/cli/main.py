"""The entry point of ``python -m overlapsim.validate``: runs plans with real kernels and records what happened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from overlapsim import __version__
from overlapsim.cli.main import LazyGroup, run

# Name -> (module, one line of help): `--help` imports none of them, and none of them imports torch before it runs.
COMMANDS: Final = {
    "doctor": ("overlapsim.validate.cli.doctor", "Say what can run here, and what is missing."),
    "gemm": ("overlapsim.validate.cli.gemm", "Time the vendor library's GEMMs alone."),
    "collective": ("overlapsim.validate.cli.collective", "Time collectives alone over a range of sizes."),
    "contention": (
        "overlapsim.validate.cli.contention",
        "Time GEMMs beside collectives, and collectives beside GEMMs.",
    ),
    "overlap": ("overlapsim.validate.cli.overlap", "Run one shape serially and overlapped, and compare."),
    "plan": ("overlapsim.validate.cli.plan", "Check or run a plan file of `overlapsim operator`."),
    "loop": ("overlapsim.validate.cli.loop", "Measure, calibrate, predict, run and compare, in one go."),
    "compile-matrix": (
        "overlapsim.validate.compile_matrix",
        "Compile the kernels for five architectures, without GPU.",
    ),
}


@click.group(cls=LazyGroup, modules=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="overlapsim.validate")
def cli() -> None:
    """Run overlap with real kernels: torch, Triton and NCCL, or gloo where there is no GPU.

    Start with torchrun, or give --ranks to the commands that need several ranks. See docs/validate.md.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors of ours become one line on stderr and their exit code."""
    run(cli, "python -m overlapsim.validate", arguments)
