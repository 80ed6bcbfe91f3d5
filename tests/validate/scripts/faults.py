"""On every rank: one way in which a run goes wrong, by the name of the fault; rank 1 is at fault."""

from __future__ import annotations

import os
import time

import click
import torch
import torch.distributed as dist
from overlapsim.validate.numerics import Problem
from overlapsim.validate.ranks import Ranks, start
from overlapsim.validate.runners.wave_group import make
from overlapsim.validate.shapes import serial_spec, wave_group_spec

from overlapsim.cli.main import run

TIMEOUT_S = 3.0


def late(ranks: Ranks) -> None:
    """Rank 1 comes to a meeting long after everybody else."""
    if ranks.rank == 1:
        ranks._note("a long nap")
        time.sleep(60)
    ranks.meet("the measurement")


def dead(ranks: Ranks) -> None:
    """Rank 1 is gone in the middle of collectives."""
    with ranks.guarded("sums of the others"):
        for step in range(1000):
            if step == 3 and ranks.rank == 1:
                os._exit(9)
            dist.all_reduce(torch.zeros(1 << 16))


def stuck(ranks: Ranks) -> None:
    """Rank 1 never takes part in a collective that the others wait in."""
    with ranks.guarded("a sum of all"):
        if ranks.rank == 1:
            time.sleep(60)
        dist.all_reduce(torch.zeros(1 << 16))


def count(ranks: Ranks, shift: int) -> None:
    """Rank 1's table says another number of tiles than its kernel counts."""
    spec = wave_group_spec(serial_spec("all_reduce", ranks.size, 128, 96, 32, "fp32"), (32, 32, 32), (4, 4, 4))
    expected = (4, 4 + (shift if ranks.rank == 1 else 0), 4)
    runner = make(Problem(spec, ranks.rank, ranks.device), expected)
    with ranks.guarded("wave groups"):
        runner.verify("wave groups")


@click.command()
@click.argument("fault")
def command(fault: str) -> None:
    """Go wrong."""
    if fault == "absent" and os.environ["RANK"] == "1":
        time.sleep(60)
    with start("gloo", timeout_s=TIMEOUT_S) as ranks:
        if fault in ("short", "long"):
            count(ranks, -1 if fault == "short" else +1)
        elif fault != "absent":
            {"late": late, "dead": dead, "stuck": stuck}[fault](ranks)


if __name__ == "__main__":
    run(command, "faults")
