"""Systems of MegaScale-MoE's evaluation: what differs between them, and where their steps' time goes."""

from __future__ import annotations

from dataclasses import fields

import pytest

from overlapsim.accuracy.moe_fused import PAIRS, fused_pairs, worthwhile
from overlapsim.accuracy.moe_steps import LAYOUTS, Steps, node_layers, points
from overlapsim.accuracy.moe_systems import MODELS, SYSTEMS, _recompute, model_spec, step_inputs
from overlapsim.accuracy.value_file import Figure
from overlapsim.step.simulate import simulate_step
from overlapsim.workload.model import MoE

SYSTEM_FIELDS = {"layout", "recipe", "recompute", "composition"}


@pytest.mark.parametrize("system", ["megatron-lm", "baseline", "sp-ep", "inter", "megascale-moe"])
def test_nothing_but_listed_choices_differs_by_system(system: str) -> None:
    base, other = (step_inputs(name, "M1", 240, 720) for name in ("baseline", system))
    for item in fields(base):
        if item.name not in SYSTEM_FIELDS:
            assert getattr(base, item.name) == getattr(other, item.name), item.name
    assert (other.layout.pp, other.layout.vpp, other.layout.dp, other.job.micro_batch) == (15, 2, 2, 1)
    assert other.stack == "megatron-2021" and other.sustained_clock == 0.8


def test_recompute_is_the_least_that_fits() -> None:
    assert _recompute("megatron-lm", "M2") == "none"
    assert _recompute("megatron-lm", "M1") == "moe+shared_experts"
    assert _recompute("baseline", "M1") == "sar"


def test_models_as_printed_have_no_shared_expert() -> None:
    whole, printed = (model_spec("M1", as_printed=printed).layers[0].mlp for printed in (False, True))
    assert isinstance(whole, MoE) and isinstance(printed, MoE)
    assert whole.shared is not None and printed.shared is None and printed.num_experts == whole.num_experts


def test_parts_of_a_step_are_all_of_it() -> None:
    (point,) = points(step_inputs("sp-ep", "M2", 32, 64), ranges=False).values()
    whole = point.compute_s + point.exposed_s + point.other_s + point.bubble_s
    assert whole == pytest.approx(point.iteration_s, rel=1e-6)
    # The GPU's own kernels are not all that is neither GEMM nor communication: it waits for its host.
    host = simulate_step(step_inputs("sp-ep", "M2", 32, 64), ranges=False).breakdown_s["host"]
    assert 0.5 * point.other_s < host < point.other_s


def test_each_step_of_the_ablation_is_faster_than_the_one_before() -> None:
    steps = Steps(ranges=False)
    seconds = [
        steps.run(name, "M1", 240, 720)[None].iteration_s for name in ("baseline", "sp-ep", "inter", "megascale-moe")
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert steps.run("megatron-lm", "M1", 240, 720)[None].iteration_s > seconds[0]


def test_throughput_and_utilization_follow_from_the_time() -> None:
    steps, keys = Steps(ranges=False), {"system": "megascale-moe", "gpus": "1440"}

    def value(metric: str, unit: str) -> float:
        return steps.predict(Figure("x", "table3", {**keys, "metric": metric}, 1.0, unit, "x:1")).value

    seconds = value("iteration", "s")
    assert value("throughput", "tok/s") == pytest.approx(720 * 8192 / seconds)
    assert value("mfu", "ratio") == pytest.approx(282.46e9 * 720 * 8192 / seconds / 1440 / 989.4e12, rel=1e-3)
    assert value("scaling", "ratio") == pytest.approx(
        steps.run("megascale-moe", "M1", 240, 720)[None].iteration_s / seconds
    )


@pytest.mark.parametrize("model", list(MODELS))
def test_layouts_rank_as_published(model: str) -> None:
    steps, layers = Steps(ranges=False), node_layers(model)
    seconds = {name: steps.run(name, model, 8, 32, layers=layers)[None].iteration_s for name in LAYOUTS}
    assert sorted(seconds, key=seconds.__getitem__) == list(LAYOUTS)


def test_fused_kernels_stay_only_where_they_pay() -> None:
    inputs = step_inputs("inter", "M2", 32, 64)
    pairs = fused_pairs(inputs)
    assert set(pairs) == set(PAIRS)
    kept = worthwhile(inputs, pairs, inputs.composition.arranging)
    assert kept and set(kept) < set(PAIRS)
    # A whole step may still be better without one of them.
    assert step_inputs("megascale-moe", "M2", 32, 64).composition.pairs.keys() <= kept.keys()
    assert not SYSTEMS["inter"].intra
