"""What a config is predicted to take, and overlap that it does not ask for: named where it gains something."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapsim.emit.base import Reading, Subject
from overlapsim.emit.gain import as_written, weighed
from overlapsim.emit.lint_base import Facts, Lint
from overlapsim.emit.lint_megatron import LINTER
from overlapsim.emit.megatron import EMITTER
from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import OperatorSettings
from overlapsim.step.simulate import simulate_step
from tests.emit.subjects import changed
from tests.emit.test_lint_megatron import LLAMA, MIXTRAL, edited

HOPPER = Facts(architecture="hopper")
H100 = load_cluster("h100-sxm8")


def read(text: str) -> Reading:
    reading = LINTER.lint(text, HOPPER).reading
    assert reading is not None
    return reading


def test_pairs_and_dispatcher_of_a_config_are_simulated() -> None:
    paired = read(MIXTRAL)
    assert paired.model is not None
    assert as_written(paired, paired.model, H100).schedule_name == "interleaved_pairs"
    plain = read(edited(MIXTRAL, drop=("--overlap-moe", "--delay")))
    assert as_written(plain, paired.model, H100).schedule_name == "interleaved"
    gathered = read(edited(MIXTRAL.replace("type alltoall", "type allgather"), drop=("--overlap-moe", "--delay")))
    assert as_written(gathered, paired.model, H100).recipe.dispatcher == "all_gather"


def test_overlap_that_gains_nothing_is_not_named() -> None:
    reading = read(edited(LLAMA, drop=("--overlap-grad", "--overlap-param", "--tp-comm")))
    model = reading.model
    assert model is not None
    nothing = Lint("missing", None, "the same again", "", (("dp_overlap", "none"),))
    something = Lint("missing", None, "gradients", "", (("dp_overlap", "both"),))
    untried = Lint("missing", None, "untried", "")
    said = list(weighed((nothing, something, untried), reading, model, H100))
    before, after = (
        simulate_step(as_written(replace(reading, settings={**reading.settings, "dp_overlap": way}), model, H100))
        for way in ("none", "both")
    )
    share = 1 - after.step_time_s / before.step_time_s
    assert [lint.message for lint in said] == [f"gradients; as predicted {share:.1%} of the step", "untried"]


def fused(base: Subject) -> Subject:
    """A plan whose experts are fused with their exchange."""
    settings = {"tile": (128, 128), "stages": 8, "comm_sms": 16}
    op = OperatorSettings("moe.fc1", "fwd", "fused_experts", settings, {})
    return replace(base, plan=replace(base.step, choice=replace(base.step.choice, operators=(op,))))


@pytest.mark.parametrize("tp", [1, 2])
def test_strategies_of_experts_are_left_out_for_what_they_are(tp: int) -> None:
    one = fused(changed("moe", {"tp": tp, "dp": 32 // tp, "sequence_parallel": True, "etp": 1}))
    (sentence,) = [said for said in EMITTER.emit(one).unexpressed if "fused_experts" in said]
    assert "grouped GEMMs of experts" in sentence
    assert "userbuffers" not in sentence
    told = EMITTER.told(one)
    assert told is not None
    assert not told.composition.pairs
