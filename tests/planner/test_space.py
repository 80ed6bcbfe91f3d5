"""The space of a request: closed counts, rules of layouts kept by every row, rules read and written back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from overlapsim.errors import PlanError
from overlapsim.planner.pruned_words import shared_reason
from overlapsim.planner.search import PlanRequest, step_inputs
from overlapsim.planner.space import COLUMNS, Axes, Constraint, Space, enumerate_space
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job, layout_reasons
from overlapsim.workload.presets import load_preset
from tests.planner.requests import GPT, MIXED, MOE, ask, candidates, space_of

PLAIN = Axes(zero=(0,), recompute=("none",), dp_overlap=("none",), schedule=("1f1b",), sequence_parallel=(True,))


def test_a_dense_model_on_one_node_has_the_layouts_that_can_be_counted_by_hand() -> None:
    """Eight GPUs, heads and layers: tp pp sp cp dp with a product of 8, sp without tp; each with its micro-batches."""
    space = space_of(ask(GPT, batch=8, axes=replace(PLAIN, degrees={"vpp": (1,)})))
    expected = Counter[tuple[int, ...]]()
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8):
            for sp in (1, 2, 4, 8) if tp == 1 else (1,):
                for cp in (1, 2, 4, 8):
                    if 8 % (tp * pp * sp * cp) == 0:
                        dp = 8 // (tp * pp * sp * cp)
                        expected[tp, pp, sp, cp, dp] = sum(8 // dp % size == 0 for size in range(1, 9))
    c = space.columns
    found = Counter(zip(*(c[name].tolist() for name in ("tp", "pp", "sp", "cp", "dp")), strict=True))
    assert found == expected


def test_one_candidate_for_each_program() -> None:
    """Overlap of gathers needs sharding, and level 3 has its own traffic: nine states of data parallelism."""
    space = space_of(ask(GPT, batch=8, axes=replace(Axes(), schedule=("1f1b",), micro_batch=(1,), recompute=("none",))))
    c = space.columns
    one = (c["tp"] == 1) & (c["pp"] == 1) & (c["dp"] == 8)
    states = set(zip(c["zero"][one].tolist(), c["dp_overlap"][one].tolist(), strict=True))
    assert len(states) == one.sum() == 9
    alone = (c["dp"] * c["sp"] * c["cp"] == 1) & (c["ep"] == 1)
    assert set(c["zero"][alone].tolist()) == {0}


def test_no_row_is_there_twice() -> None:
    """Of any model."""
    for model in (GPT, MOE, MIXED):
        space = space_of(ask(model, batch=16))
        rows = np.stack([space.columns[name] for name in COLUMNS])
        assert len(np.unique(rows, axis=1).T) == len(space) > 0


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(candidates())
def test_every_row_is_a_step_that_may_be_asked(drawn: tuple[PlanRequest, Space, int]) -> None:
    """No rule speaks against its layout and batch, and it uses the whole machine."""
    request, space, row = drawn
    layout, job = space.layout(row), space.job(row)
    assert layout_reasons(layout, request.model, job) == ()
    assert layout.world_size == request.cluster.num_devices
    assert step_inputs(request, space, row).num_micro_batches * layout.dp * job.micro_batch == request.global_batch


def test_uneven_stages_are_there_where_they_are_asked_for() -> None:
    """Six layers on four or eight stages divide only unevenly; the ends hold fewer."""
    uneven = space_of(ask(MIXED, batch=16, axes=Axes(uneven=True)))
    even = space_of(ask(MIXED, batch=16))
    assert set(even.columns["pp"].tolist()) == {1, 2}
    assert set(uneven.columns["pp"].tolist()) == {1, 2, 4}
    row = int(np.argmax(uneven.columns["pp"] == 4))
    assert uneven.job(row).stage_layers == (1, 2, 2, 1)


def test_constraints_leave_what_keeps_them_and_count_the_rest() -> None:
    """A rule on degrees keeps layouts from being made, one on other columns is counted."""
    texts = ("tp<=2", "pp=2", "micro_batch>=2", "recompute=full")
    whole = space_of(ask(GPT, batch=16))
    space = space_of(ask(GPT, batch=16, constraints=tuple(map(Constraint.parse, texts))))
    c = space.columns
    assert len(space) > 0
    assert c["tp"].max() <= 2
    assert set(c["pp"].tolist()) == {2}
    assert c["micro_batch"].min() >= 2
    kept = (whole.columns["tp"] <= 2) & (whole.columns["pp"] == 2) & (whole.columns["micro_batch"] >= 2)
    kept &= whole.columns["recompute"] == Constraint.parse("recompute=full").value
    assert kept.sum() == len(space)
    assert space.pruned["constraint recompute=full"] > 0


@pytest.mark.parametrize("text", ["tp<=8", "pp=4", "micro_batch>=2", "schedule=zbv", "dp_overlap=both", "zero<=1"])
def test_a_rule_is_read_as_it_is_written(text: str) -> None:
    """And spaces do not matter."""
    assert str(Constraint.parse(text)) == text
    assert Constraint.parse(text.replace("=", " = ").replace("< =", " <=").replace("> =", " >=")) == Constraint.parse(
        text
    )


@pytest.mark.parametrize("text", ["tp", "tp<8", "tp=x", "speed<=3", "recompute<=full", "recompute=some", "tp=-1", ""])
def test_what_is_no_rule_is_refused(text: str) -> None:
    """With what a rule looks like, as a usage error."""
    with pytest.raises(PlanError, match="expected COLUMN<=N") as caught:
        Constraint.parse(text)
    assert caught.value.exit_code == 2


def test_what_is_left_out_is_said_in_words() -> None:
    """Odd sequences: every reason is a sentence, not the name of what it is about."""
    space = enumerate_space(load_preset("mixtral-8x7b"), 24, 48, 4095, Axes())
    assert space.pruned["ep with tp needs sequence parallelism"] > 0
    assert space.pruned["2 x cp does not divide the sequence"] > 0
    assert all(len(reason.split()) > 3 for reason in space.pruned)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(ep=3, etp=1, dp=3), "ep does not divide the experts of a layer"),
        (Layout(tp=5, etp=5), "tp does not divide the query, key and value heads"),
        (Layout(sp=5), "sp does not divide the heads of a tensor-parallel rank"),
        (Layout(etp=9, dp=9), "etp does not divide the width of a feed-forward block"),
    ],
)
def test_reasons_of_layouts_are_shared(layout: Layout, words: str) -> None:
    reasons = layout_reasons(layout, load_preset("mixtral-8x7b"), Job(4096))
    assert words in [shared_reason(reason) for reason in reasons]
