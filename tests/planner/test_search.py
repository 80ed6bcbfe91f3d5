"""The search: nothing better is left out, answers are those of the engine, infeasible requests say what is nearest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapsim.errors import PlanError
from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.funnel import PLAN
from overlapsim.planner.search import PlanRequest, SearchResult, search
from overlapsim.planner.space import Axes, Constraint
from overlapsim.step.simulate import simulate_step
from overlapsim.workload.presets import load_preset
from overlapsim.workload.recipe import Recipe
from tests.planner.requests import GPT, MIXED, MOE, ask

NARROW = Axes(zero=(0, 1), recompute=("none",), dp_overlap=("none", "gradients"), sequence_parallel=(True,))
PAIRS = ("zbv", "dualpipe", "dualpipev", "interleaved_pairs")


def rules(*texts: str) -> tuple[Constraint, ...]:
    """Constraints of a request."""
    return tuple(map(Constraint.parse, texts))


SMALL = {
    "dense": ask(GPT, batch=8, axes=NARROW, constraints=rules("micro_batch<=2", "sp=1", "cp=1")),
    "dense with sharding": ask(
        GPT,
        batch=8,
        axes=replace(NARROW, zero=(0, 1, 2, 3), dp_overlap=("both",)),
        constraints=rules("cp=1", "sp=1", "pp<=2"),
    ),
    "strategies": ask(GPT, batch=8, axes=NARROW, constraints=rules("tp>=4", "micro_batch<=2"), sequence=2048),
    "two nodes": ask(GPT, nodes=2, batch=16, axes=NARROW, constraints=rules("micro_batch=1", "sp=1", "cp=1")),
    "recompute": ask(
        GPT,
        batch=8,
        axes=replace(NARROW, recompute=("none", "selective", "sar", "full")),
        constraints=rules("tp<=2", "cp=1", "sp=1"),
    ),
    "experts": ask(MOE, batch=8, axes=NARROW, constraints=rules("micro_batch=1", "sp=1", "cp=1")),
    "a dense layer first": ask(MIXED, batch=8, axes=NARROW, constraints=rules("micro_batch=1", "cp=1", "sp=1")),
    "uneven": ask(MIXED, batch=8, axes=replace(NARROW, uneven=True), constraints=rules("pp>=4", "micro_batch<=2")),
    "uneven with sharding": ask(
        MIXED,
        batch=8,
        axes=replace(NARROW, uneven=True, zero=(0, 3), schedule=("1f1b",)),
        constraints=rules("pp=4", "micro_batch=1", "tp=1", "cp=1"),
    ),
    "pairs": ask(
        GPT,
        batch=16,
        axes=replace(NARROW, schedule=PAIRS),
        constraints=rules("pp>=2", "tp<=2", "micro_batch=1", "cp=1"),
    ),
    "little memory": ask(GPT, batch=16, memory_bytes=3e9, axes=replace(NARROW, zero=(0, 1, 2))),
}


def layouts(result: SearchResult) -> list[tuple[int, ...]]:
    """Degrees of the plans, in order, each once."""
    found = (tuple(int(result.space.columns[name][entry.row]) for name in PLAN) for entry in result.best)
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("request_", SMALL.values(), ids=SMALL)
def test_the_funnel_finds_what_running_everything_finds(request_: PlanRequest) -> None:
    """The same best time, the same times of the best layouts, the same best without strategies; with fewer runs."""
    request = replace(request_, top=3)
    quick, whole = search(request), search(replace(request, exhaustive=True))
    assert quick.num_candidates == whole.num_candidates
    assert quick.num_run < whole.num_run
    assert quick.best[0].result.step_time_s == whole.best[0].result.step_time_s
    of_each = [
        min(f.result.step_time_s for f in r.best if _plan(r, f) == plan) for r in (quick, whole) for plan in layouts(r)
    ]
    half = len(of_each) // 2
    assert of_each[:half] == of_each[half:]
    assert quick.best_serial is not None
    assert whole.best_serial is not None
    assert quick.best_serial.result.step_time_s == whole.best_serial.result.step_time_s


def _plan(result: SearchResult, found: object) -> tuple[int, ...]:
    return tuple(int(result.space.columns[name][found.row]) for name in PLAN)  # type: ignore[attr-defined]


def test_a_plan_is_its_simulated_step() -> None:
    """Simulated anew it takes as long, fits, and is not below its bound."""
    request = SMALL["strategies"]
    result = search(request)
    for found in result.best:
        again = simulate_step(found.result.inputs, ranges=False)
        assert again.step_time_s == pytest.approx(found.result.step_time_s, rel=1e-12)
        assert again.fullest.total_bytes <= request.limit_bytes
        assert found.bound_s <= again.step_time_s * (1 + 1e-9)
    times = [found.result.step_time_s for found in result.best]
    assert times == sorted(times)
    assert len(layouts(result)) <= request.top


@pytest.mark.parametrize("exhaustive", [False, True])
@pytest.mark.parametrize("name", ["strategies", "experts", "little memory"])
def test_candidates_are_all_accounted_for(name: str, exhaustive: bool) -> None:
    """Each was run or left out for a reason that is counted once, layouts that are refused whole too."""
    result = search(replace(SMALL[name], exhaustive=exhaustive))
    assert result.space.pruned or name == "little memory"
    assert all(count > 0 for count in result.pruned.values())
    assert result.num_run + sum(result.pruned.values()) == result.num_candidates


def test_dispatchers_that_are_named_are_used() -> None:
    """One alone is that of the whole search; the best without strategies has the best of those allowed."""
    rules_ = rules("micro_batch=1", "cp=1", "sp=1", "tp=1", "pp=1", "ep=8")
    axes = replace(NARROW, dispatcher=("deepep",))
    request = ask(MOE, batch=8, axes=axes, constraints=rules_)
    assert request.recipe.dispatcher == "deepep"
    alone = search(request)
    assert {found.result.inputs.recipe.dispatcher for found in alone.best} == {"deepep"}
    several = search(replace(request, recipe=Recipe(), axes=replace(axes, dispatcher=("all_to_all", "deepep"))))
    assert alone.best_serial is not None and several.best_serial is not None
    assert several.best_serial.result.inputs.recipe.dispatcher == "deepep"
    assert several.best_serial.result.step_time_s == alone.best_serial.result.step_time_s


def test_a_dispatcher_without_kernels_on_a_machine_leaves_its_layouts_out() -> None:
    """GPUs without NVLink to all others; what is left has no experts spread."""
    axes = replace(NARROW, dispatcher=("deepep",))
    request = replace(
        ask(MOE, batch=8, axes=axes, constraints=rules("micro_batch=1", "cp=1", "sp=1")),
        cluster=load_cluster("l40s-pcie8"),
    )
    result = search(request)
    assert {found.result.inputs.layout.ep for found in result.best} == {1}
    assert "expected a machine with both" in result.refused
    assert result.pruned["the machine has no kernels of the dispatcher"] > 0
    assert result.num_run + sum(result.pruned.values()) == result.num_candidates
    with pytest.raises(PlanError, match="dispatch deepep over"):
        search(replace(request, constraints=rules("ep=8")))


def test_strategies_are_taken_only_where_they_are_faster() -> None:
    """The best plan has some here; the best without is slower, and has none."""
    result = search(SMALL["strategies"])
    assert result.best_serial is not None
    best, serial = result.best[0].result, result.best_serial.result
    assert best.inputs.composition.pairs
    assert not serial.inputs.composition.pairs
    assert best.step_time_s < serial.step_time_s
    library = search(replace(SMALL["strategies"], axes=replace(NARROW, overlap=("library",))))
    assert library.best[0].result.step_time_s == serial.step_time_s


def test_nothing_changes_what_is_computed() -> None:
    """Every plan keeps dtype and recipe that were asked for, and no strategy declares that it changes numbers."""
    result = search(SMALL["strategies"])
    for found in result.best:
        assert found.result.inputs.recipe == SMALL["strategies"].recipe
        assert found.result.inputs.model.dtype == GPT.dtype


def test_the_same_request_has_the_same_answer() -> None:
    """Plans, order and counts."""
    first, second = search(SMALL["experts"]), search(SMALL["experts"])
    assert [f.result.step_time_s for f in first.best] == [f.result.step_time_s for f in second.best]
    assert [str(f.result.inputs.layout) for f in first.best] == [str(f.result.inputs.layout) for f in second.best]
    assert first.pruned == second.pruned
    assert first.num_run == second.num_run


def test_what_does_not_fit_says_how_many_nodes_would() -> None:
    """A model of 175 billion parameters on one node; on the nodes named there is a plan that fits, on fewer none."""
    request = PlanRequest(load_preset("gpt3-175b"), load_cluster("a100-sxm8"), 64, 2048)
    with pytest.raises(PlanError, match=r"no layout of gpt3-175b fits .* nodes") as caught:
        search(request)
    assert caught.value.exit_code == 1
    nodes = int(str(caught.value).split(" nodes (")[0].rsplit(" ", 1)[1])
    fewer = replace(request, cluster=request.cluster.with_nodes(nodes - 1))
    with pytest.raises(PlanError):
        search(fewer)
    found = search(replace(request, top=1, cluster=request.cluster.with_nodes(nodes), axes=Axes(overlap=("library",))))
    assert found.best[0].result.fullest.total_bytes <= request.limit_bytes


def test_a_batch_that_does_not_divide_names_those_that_do() -> None:
    """Seven sequences on eight GPUs that must all be replicas."""
    with pytest.raises(PlanError, match=r"a global batch of 8") as caught:
        search(ask(GPT, batch=7, constraints=rules("dp=8")))
    assert caught.value.exit_code == 1
    assert "without dp=8" in str(caught.value)


def test_saving_memory_is_proposed_where_it_was_forbidden() -> None:
    """Full recompute lets a long sequence fit."""
    request = ask(
        GPT,
        batch=8,
        sequence=8192,
        memory_bytes=6e9,
        axes=replace(NARROW, zero=(0,)),
        constraints=rules("dp=8", "micro_batch=1"),
    )
    with pytest.raises(PlanError, match="with recompute full"):
        search(request)
    allowed = replace(request, axes=replace(request.axes, recompute=("full",)))
    assert search(allowed).best[0].result.fullest.total_bytes <= request.limit_bytes
