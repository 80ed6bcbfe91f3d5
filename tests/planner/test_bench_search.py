"""Time of searches over real jobs; run with -m benchmark, warm: the second round counts.

Beside them stand other tools' own words: Calculon enumerates 1,096,832 candidates for GPT-3 175B on 512 GPUs and prints
140 to 174 configurations a second.
"""

from __future__ import annotations

import pytest

from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.funnel import HIDES
from overlapsim.planner.layout_bounds import LayoutBounds
from overlapsim.planner.memory_screen import least_bytes
from overlapsim.planner.search import PlanRequest, SearchResult, search, step_inputs
from overlapsim.planner.space import Space, enumerate_space
from overlapsim.workload.presets import load_preset

pytestmark = pytest.mark.benchmark
JOBS = {
    "gpt3-175b on 512 A100": ("gpt3-175b", "a100-sxm8", 64, 1536, 2048),
    "internal-352b on 1,440 H800": ("internal-352b", "h800-sxm8", 180, 720, 8192),
    "qwen3-30b-a3b on 32 H100": ("qwen3-30b-a3b", "h100-sxm8", 4, 512, 4096),
    "mixtral-8x7b on 32 H800": ("mixtral-8x7b", "h800-sxm8", 4, 64, 8192),
}
CALCULON_CANDIDATES = 1_096_832


def job(name: str) -> PlanRequest:
    """A request with all axes."""
    model, cluster, nodes, batch, sequence = JOBS[name]
    return PlanRequest(load_preset(model), load_cluster(cluster).with_nodes(nodes), batch, sequence)


@pytest.mark.parametrize("name", JOBS)
def test_search(benchmark: object, name: str) -> None:
    """From a request to its best plans."""
    request = job(name)
    result: SearchResult = benchmark.pedantic(lambda: search(request), rounds=1, warmup_rounds=1)  # type: ignore[attr-defined]
    benchmark.extra_info.update(candidates=result.num_candidates, run=result.num_run)  # type: ignore[attr-defined]
    assert result.best
    if name.startswith("gpt3"):
        assert result.num_candidates >= CALCULON_CANDIDATES


def test_screen(benchmark: object) -> None:
    """Memory and time bounds of every candidate of the largest space that there is here."""
    request = job("gpt3-175b on 512 A100")

    def screen() -> Space:
        space = enumerate_space(
            request.model, request.cluster.num_devices, request.global_batch, request.sequence, request.axes
        )
        inputs = step_inputs(request, space, 0)
        least_bytes(space, inputs)
        bounds = LayoutBounds(space, inputs, {})
        for hides in HIDES:
            bounds.hardware(hides=hides)
        return space

    space = benchmark.pedantic(screen, rounds=1, warmup_rounds=1)  # type: ignore[attr-defined]
    benchmark.extra_info.update(candidates=len(space))  # type: ignore[attr-defined]
