"""On every rank: run the plans of a folder and some further shapes, and hold what comes out against float64."""

from __future__ import annotations

import sys
from pathlib import Path

from overlapsim.validate.numerics import Problem
from overlapsim.validate.plans import RunSpec, read_spec
from overlapsim.validate.ranks import start
from overlapsim.validate.runners.catalogue import make_runner

from overlapsim.cost.tiles import TileGrid
from overlapsim.schedule.reorder import collective_map

KINDS = ("all_reduce", "reduce_scatter", "all_to_all")


def ragged(ranks: int) -> list[RunSpec]:
    """Shapes that neither tiles nor ranks divide, groups of one tile and of many, all collectives."""
    specs = []
    for kind in KINDS:
        m, n, k = 201, 150, 64
        grid = TileGrid(m, n, 32, 64)
        groups = (1, grid.num_tiles - 8, 7)
        reorder = collective_map(kind, grid, groups, ranks=ranks, swizzle=2)
        base = (kind, ranks, m, n, k, "fp32", "fp32")
        specs.append(RunSpec("serial", {}, *base, {}))
        specs.append(RunSpec("chunked", {}, *base, {"chunk_rows": [128, 50, 23]}))
        specs.append(RunSpec("wave_group", {}, *base, {"group_tiles": list(groups)}, reorder))
    gather = ("all_gather", ranks, 201, 150, 64, "fp32", "fp32")
    specs += [RunSpec("serial", {}, *gather, {}), RunSpec("chunked", {}, *gather, {"chunk_rows": [128, 50, 23]})]
    return specs


def main(folder: Path, only_plans: bool) -> None:
    with start("gloo", timeout_s=30) as ranks:
        specs = [(path.stem, read_spec(path, ranks=ranks.size)) for path in sorted(folder.glob("*.yaml"))]
        if not only_plans:
            specs += [(f"ragged {spec.strategy} {spec.collective}", spec) for spec in ragged(ranks.size)]
        for seed, (name, spec) in enumerate(specs):
            problem = Problem(spec, ranks.rank, ranks.device, seed)
            runner = make_runner(problem)
            with ranks.guarded(name):
                first = runner.verify(name)
                problem.refresh(seed + 100)
                again = runner.verify(name)
            worst = ranks.largest([max(first, again)])[0]
            if ranks.is_first:
                print(f"ok {name}: {worst:.3f} of the tolerance, {ranks.num_nodes} nodes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["plans"])
