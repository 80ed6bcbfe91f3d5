"""First stage, on all ranks: parts alone and beside one another, as records and one small JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from overlapsim.validate.budget import Budget
from overlapsim.validate.idle import wait_until_idle
from overlapsim.validate.loop import sizes
from overlapsim.validate.measure import Sampler, Sampling
from overlapsim.validate.numerics import Problem
from overlapsim.validate.output import RecordFile, header_of
from overlapsim.validate.runners.wave_group import make
from overlapsim.validate.sweeps import far_apart, sweep_collectives, sweep_contention, sweep_gemms

from overlapsim.report.files import write_text
from overlapsim.units import format_time

if TYPE_CHECKING:
    from overlapsim.validate.ranks import Ranks

RECORDS: Final = "records.csv"
KERNELS: Final = "kernels.json"
REPEATS: Final = 12
COLLECTIVE_ROUNDS: Final = 4
GEMM_ROUNDS: Final = 2
"""A message's time over gloo has several modes that last for seconds: rounds see more of them than repeats do."""
WARMUP_S: Final = 0.03
PATIENCE_S: Final = 0.6
IDLE_PATIENCE_S: Final = 15.0


def measure_parts(ranks: Ranks, folder: Path, time_budget: float, repeats: int = REPEATS) -> None:
    """Measure everything that the calibration takes; what is in the folder already is not measured again."""
    budget = Budget(time_budget)
    budget.announce(
        f"parts on {ranks.size} ranks: {len(sizes.GEMM_SHAPES)} GEMMs, {len(sizes.KINDS)} collectives "
        f"of {len(sizes.SIZES)} sizes, contention, kernels by tiles",
        ranks.is_first,
    )
    _wait(ranks, budget)
    file = RecordFile(folder / RECORDS, header_of(ranks), writes=ranks.is_first)
    sampler = Sampler(ranks, Sampling(repeats=repeats, warmup_s=WARMUP_S, patience_s=PATIENCE_S))
    # The most telling first: a budget that ends early then costs accuracy, not a whole part.
    sweep_contention(sampler, sizes.BESIDE_SHAPES, sizes.KINDS, sizes.DTYPE, file, budget, COLLECTIVE_ROUNDS)
    _kernels(sampler, folder, budget)
    sweep_collectives(sampler, sizes.KINDS, sizes.SIZES, sizes.DTYPE, file, budget, COLLECTIVE_ROUNDS)
    sweep_gemms(sampler, far_apart(sizes.GEMM_SHAPES), sizes.DTYPE, file, budget, GEMM_ROUNDS)


def _kernels(sampler: Sampler, folder: Path, budget: Budget) -> None:
    """Time of the GEMM by tiles alone, numbers first."""
    ranks, path = sampler.ranks, folder / KERNELS
    if ranks.largest([float(ranks.is_first and path.exists())])[0]:
        return
    rows: list[dict[str, Any]] = []
    for spec in sizes.kernel_specs(ranks.size):
        what = f"kernel by tiles {spec.m}x{spec.n}x{spec.k}"
        runner = make(Problem(spec, ranks.rank, ranks.device))
        with ranks.guarded(what):
            runner.verify(what)
        timing = sampler.time(runner.kernel_alone, what)
        budget.tell(f"{what}: {format_time(timing.median_s)}", ranks.is_first)
        rows.append({"m": spec.m, "n": spec.n, "k": spec.k, "time_s": timing.median_s, "valid": timing.valid})
    if ranks.is_first:
        write_text(path, json.dumps({"tile": list(sizes.TILE), "dtype": sizes.DTYPE, "rows": rows}, indent=2) + "\n")


def _wait(ranks: Ranks, budget: Budget) -> None:
    """Let a busy machine get quiet, for a while."""
    if ranks.device.type != "cpu":
        return
    finding = wait_until_idle(IDLE_PATIENCE_S) if ranks.is_first else None
    ranks.meet("a quiet machine")
    if finding is not None:
        budget.tell(f"finding {finding.code}: {finding.message}")
