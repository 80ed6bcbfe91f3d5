"""NCCL's tuner table: golden files, every collective and size covered, the plan's groups and SMs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapsim.cost.tuner import TunerMachine, library_choice
from overlapsim.emit.base import Subject
from overlapsim.emit.nccl import ANY, COLLECTIVES, EMITTER, ENVIRONMENT, KEEP, MOST_BYTES, TABLE, groups_of
from overlapsim.errors import PlanError
from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import OperatorSettings
from tests.emit.subjects import PLANS, check_golden, subject

SPELT = {spelling: name for name, spelling in COLLECTIVES.items()}


def rows(base: Subject) -> list[tuple[str, ...]]:
    """Lines of the table as the plugin reads them."""
    lines = EMITTER.emit(base).files[TABLE].splitlines()
    assert all(len(line) < 255 for line in lines)
    return [tuple(line.split(",")) for line in lines if not line.startswith("#")]


def match(table: list[tuple[str, ...]], collective: str, size: int, nodes: int, ranks: int) -> tuple[str, ...]:
    """First row that the plugin takes."""
    for row in table:
        ours = row[0] == COLLECTIVES[collective] and int(row[1]) <= size <= int(row[2])
        if ours and row[6] in (str(nodes), "-1") and row[7] in (str(ranks), "-1"):
            return row
    raise AssertionError(f"no row for {collective} of {size} bytes on {ranks} ranks: NCCL would take one channel")


@pytest.mark.parametrize("name", PLANS)
def test_golden(name: str) -> None:
    check_golden(f"nccl-{name}", EMITTER.emit(subject(name)))


@pytest.mark.parametrize("name", PLANS)
def test_fields_are_those_that_the_plugin_reads(name: str) -> None:
    for row in rows(subject(name)):
        assert len(row) == 10
        assert row[0] in SPELT
        assert row[3] in ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
        assert row[4] in ("ll", "ll128", "simple")
        assert all(field.lstrip("-").isdecimal() for field in (row[1], row[2], *row[5:]))
        assert int(row[5]) >= KEEP  # -1 would become one channel


@given(
    name=st.sampled_from(PLANS),
    collective=st.sampled_from(list(COLLECTIVES)),
    size=st.integers(0, MOST_BYTES),
    group=st.integers(0, 9),
)
def test_every_size_has_a_row(name: str, collective: str, size: int, group: int) -> None:
    base = subject(name)
    table = TABLES[name]
    assert base.cluster is not None
    groups = (*groups_of(base, base.cluster), (5, 3))
    nodes, ranks = groups[group % len(groups)]
    row = match(table, collective, size, nodes, ranks)
    assert (row[6] == "-1") == ((nodes, ranks) == (5, 3))


TABLES = {name: rows(subject(name)) for name in PLANS}


@pytest.mark.parametrize("name", PLANS)
def test_ranges_join_without_gap_or_overlap(name: str) -> None:
    by_group: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for row in rows(subject(name)):
        by_group.setdefault((row[0], row[6], row[7]), []).append((int(row[1]), int(row[2])))
    for ranges in by_group.values():
        assert ranges[0][0] == 0
        assert ranges[-1][1] == MOST_BYTES
        assert all(low == before + 1 for (_, before), (low, _) in pairwise(ranges))


@given(size=st.integers(0, 2**32))
def test_rows_are_the_published_models_choice(size: int) -> None:
    node = load_cluster("h100-sxm8").node
    machine = TunerMachine(
        "hopper", "nvlink", node.nvlink_bandwidth_bytes_per_s, 8 * 50e9, 8, switch_reduction=node.switch_reduction
    )
    pairs, index = library_choice(machine, "all_reduce", size)
    row = match(TABLES["dense"], "all_reduce", size, 1, 8)
    assert (row[3], row[4]) == pairs[int(index)]


def test_groups_are_those_of_the_layout() -> None:
    base = subject("dense")
    assert base.cluster is not None
    # tp within a node; data-parallel ranks 32 apart, on nodes of their own.
    assert groups_of(base, base.cluster) == ((1, 8), (2, 2))
    moe = subject("moe")
    assert moe.cluster is not None
    assert set(groups_of(moe, moe.cluster)) == {(4, 32), (4, 4)}


def test_sms_that_a_strategy_asks_for_are_the_channels() -> None:
    base = subject("dense")
    settings = {"collective": "reduce_scatter", "ranks": 8, "comm_engine": "kernel", "comm_sms": 16}
    op = OperatorSettings("mlp.fc2", "fwd", "pipelined_rs", {"comm_sms": 16}, settings)
    plan = replace(base.step, choice=replace(base.step.choice, operators=(op,)))
    table = rows(replace(base, plan=plan))
    assert match(table, "reduce_scatter", 2**28, 1, 8)[5] == "16"
    assert match(table, "all_gather", 2**28, 1, 8)[5] != "16"


def test_environment_names_the_table_and_leaves_algorithms_to_it() -> None:
    text = EMITTER.emit(subject("dense")).files[ENVIRONMENT]
    assert f"NCCL_TUNER_CONFIG_FILE=$PWD/{TABLE}" in text
    assert "unset NCCL_ALGO NCCL_PROTO" in text


def test_other_communicators_keep_their_channels() -> None:
    row = match(TABLES["dense"], "all_reduce", 2**30, 7, 56)
    assert row[3:] == ("ring", "simple", str(KEEP), str(ANY), str(ANY), str(ANY), str(ANY))


def test_other_vendors_and_no_cluster_are_refused() -> None:
    with pytest.raises(PlanError, match="does not run NCCL"):
        EMITTER.emit(replace(subject("fsdp"), cluster=load_cluster("mi300x8")))
    with pytest.raises(PlanError, match="cluster"):
        EMITTER.emit(replace(subject("fsdp"), cluster=None))
