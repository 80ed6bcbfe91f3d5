"""Flags of a Megatron launch that a version does not have, has no more, or takes other values for."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Final

from overlapsim.emit.lint_base import Lint
from overlapsim.emit.lint_megatron_config import Config
from overlapsim.emit.megatron_options import INSTEAD, megatron_options
from overlapsim.emit.rules import Version

LAUNCHER: Final = frozenset(
    {
        *("--nnodes", "--nproc_per_node", "--nproc-per-node", "--node_rank", "--node-rank", "--rdzv_id", "--rdzv-id"),
        *(
            "--rdzv_backend",
            "--rdzv-backend",
            "--rdzv_endpoint",
            "--rdzv-endpoint",
            "--standalone",
            "--tee",
            "--log_dir",
        ),
        *("--master_addr", "--master-addr", "--master_port", "--master-port", "--max_restarts", "--max-restarts"),
        *("--redirects", "--log-dir", "--local-ranks-filter", "--ntasks", "--ntasks-per-node", "--gpus-per-node"),
        *(
            "--container-image",
            "--container-mounts",
            "--job-name",
            "--partition",
            "--nodes",
            "--gpus",
            "--ipc",
            "--env",
        ),
        *("--exclusive", "--mpi", "--cpu-bind", "--output", "--error", "--time", "--account", "--rm", "--network"),
        *("--no-container-mount-home", "--container-workdir", "--overwrite", "--kill-on-bad-exit", "--help"),
    }
)
"""Flags of torchrun, Slurm and containers that stand in the same script."""


def flags_rule(config: Config) -> Iterator[Lint]:
    """Yield what is wrong with single flags."""
    options = megatron_options()
    for argument in config.script.arguments:
        flag = argument.flag
        if flag in LAUNCHER:
            continue
        option = options.get(flag)
        if option is None:
            near = difflib.get_close_matches(flag, options, n=1, cutoff=0.85)
            fix = f"did you mean {near[0]}?" if near else "keep it only if a script of yours reads it"
            message = f"{flag} is no option of Megatron-Core {config.version} or of any version looked at"
            yield Lint("unknown", argument.line, message, fix)
        elif option.since and config.version < Version.parse(option.since):
            message = f"{flag} came with Megatron-Core {option.since}; {config.version} stops at it"
            fix = (
                f"write {option.before} instead"
                if option.before
                else f"take Megatron-Core {option.since} or leave it out"
            )
            yield Lint("unknown", argument.line, message, fix)
        elif option.until and config.version >= Version.parse(option.until):
            message = f"{flag} is gone since Megatron-Core {option.until}; {config.version} stops at it"
            fix = f"write {INSTEAD[flag]} instead" if flag in INSTEAD else "leave it out"
            yield Lint("unknown", argument.line, message, fix)
        elif option.form == "value" and not argument.values:
            yield Lint(
                "conflict", argument.line, f"{flag} takes a value and has none", "give one, or leave the flag out"
            )
        elif (known := option.takes(config.version)) and any(v not in known and "$" not in v for v in argument.values):
            message = f"{flag} is {' '.join(argument.values)}"
            yield Lint("conflict", argument.line, message, f"expected of {', '.join(known)}")
    given = [argument.flag for argument in config.script.arguments]
    for flag in dict.fromkeys(given):
        if given.count(flag) > 1 and flag in options:
            yield config.lint(
                "conflict", f"{flag} is given {given.count(flag)} times; the last one counts", "keep one", flag
            )
