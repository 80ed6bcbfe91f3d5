"""Userbuffer files: every key, kinds switched together, a layer filled from its sizes held against published ones."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from overlapsim.emit.fill import fill, one_layer
from overlapsim.emit.rules import Version
from overlapsim.emit.transformer_engine import EMITTER, FILE, switches
from overlapsim.emit.userbuffers import GATHERS, GEMMS, userbuffers, yaml_text
from overlapsim.errors import UsageError
from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import OperatorSettings
from overlapsim.strict_yaml import parse
from overlapsim.workload.layout import Layout
from tests.emit.subjects import PLANS, check_golden, subject

KEYS = {"method", "num_sm", "cga_size", "set_sm_margin", "num_splits", "aggregate", "atomic_gemm", "use_ce", "fp8_buf"}
NEWEST = Version.parse("2.18")
TP8 = Layout(tp=8)
# https://github.com/NVIDIA-NeMo/Speech/pull/11763: hidden 18432, tp 8, micro-batch 1, 4096 tokens, bf16, H100.
PUBLISHED = """\
gemm,method,num_sm
qkv_dgrad,bulk,8
qkv_wgrad,bulk,32
fc1_dgrad,bulk,2
fc1_wgrad,bulk,8
proj_fprop,pipeline,32
fc2_fprop,pipeline,24
qkv_fprop,ring_exchange,
fc1_fprop,ring_exchange,
"""


def ring(name: str, pass_: str, **settings: Any) -> OperatorSettings:
    given = {"collective": "all_gather", "form": "unidirectional", "comm_engine": "copy_engine", "comm_sms": 0}
    return OperatorSettings(name, pass_, "ring_exchange", {}, {**given, "compute_streams": 2, **settings})


def pipeline(name: str, pass_: str = "fwd", **settings: Any) -> OperatorSettings:
    given = {"collective": "reduce_scatter", "comm_sms": 16, "num_splits": 4, "split_rows": [1024] * 4}
    more = {"sm_margin": True, "overlap_first_gemm": False}
    return OperatorSettings(name, pass_, "pipelined_rs", {}, {**given, **more, **settings})


@pytest.mark.parametrize("name", PLANS)
def test_golden(name: str) -> None:
    check_golden(f"transformer_engine-{name}", EMITTER.emit(subject(name)))


def test_every_key_is_there_whatever_the_method() -> None:
    given = userbuffers(
        (ring("attn.qkv", "fwd"), pipeline("attn.out"), pipeline("mlp.fc2", overlap_first_gemm=True)), TP8, NEWEST
    )
    for name, keys in given.gemms.items():
        assert set(keys) - {"pipeline_rs_overlap_first_gemm"} == KEYS, name
    assert given.gemms["fc2_fprop"]["pipeline_rs_overlap_first_gemm"] is True
    assert parse(yaml_text(given.gemms)) == given.gemms
    assert switches(given) == ("--tp-comm-overlap",)
    assert given.unexpressed == (
        "fc1_fprop, proj_dgrad, fc2_dgrad not overlapped: GEMMs of a kind are switched together, so that Transformer "
        "Engine's default overlaps them",
    )


def test_a_key_that_came_later_is_not_written_for_older_versions() -> None:
    given = userbuffers((pipeline("attn.out", overlap_first_gemm=True),), TP8, Version.parse("1.11"))
    assert set(given.gemms["proj_fprop"]) == KEYS
    assert any("has no key before Transformer Engine 2.2" in sentence for sentence in given.unexpressed)


def test_kinds_without_any_overlap_are_switched_off() -> None:
    only = userbuffers((pipeline("attn.out"), pipeline("mlp.fc2")), TP8, NEWEST)
    assert switches(only) == ("--tp-comm-overlap", "--disable-tp-comm-overlap-ag")
    assert not userbuffers((), TP8, NEWEST).used


def test_scattering_with_dgrad_is_one_switch_for_all_columns() -> None:
    dgrads = tuple(pipeline(name, "dgrad") for name in ("attn.qkv", "mlp.fc1"))
    both = userbuffers(dgrads, TP8, NEWEST)
    assert both.scatter_with_dgrad
    assert set(both.gemms) == {"qkv_dgrad", "fc1_dgrad"}, "an entry for wgrad is refused beside these"
    assert switches(both)[-1] == "--tp-comm-overlap-rs-dgrad"
    assert not any("bulk" in flag for flag in switches(both))
    one = userbuffers(dgrads[:1], TP8, NEWEST)
    assert not one.scatter_with_dgrad
    assert one.gemms == {}
    assert any("qkv_dgrad alone scatters" in sentence for sentence in one.unexpressed)


def test_splits_divide_the_rows() -> None:
    given = userbuffers((pipeline("attn.out", num_splits=6, split_rows=[768] * 5 + [256]),), TP8, NEWEST)
    assert given.gemms["proj_fprop"]["num_splits"] == 4
    assert any("4096 rows do not divide into 6 splits; 4 are written" in sentence for sentence in given.unexpressed)


@pytest.mark.parametrize("layout", [Layout(tp=1), Layout(tp=8, sequence_parallel=False)])
def test_without_split_sequences_there_are_no_userbuffers(layout: Layout) -> None:
    given = userbuffers((ring("attn.qkv", "fwd"),), layout, NEWEST)
    assert not given.used
    assert given.gemms == {}
    assert "userbuffers need split sequences" in given.unexpressed[0]


def test_what_the_library_does_not_have_is_named_once() -> None:
    fused = OperatorSettings("attn.out", "fwd", "fused_tiles", {}, {"collective": "reduce_scatter"})
    given = userbuffers(
        (fused, ring("attn.qkv", "fwd", form="bidirectional", comm_engine="kernel", comm_sms=4)), TP8, NEWEST
    )
    assert given.scatter, "its own default stands in"
    assert sum("fused_tiles of proj_fprop" in sentence for sentence in given.unexpressed) == 1
    assert any("goes both ways" in sentence for sentence in given.unexpressed)
    assert given.gemms["qkv_fprop"]["use_ce"] is False
    assert given.gemms["qkv_fprop"]["num_sm"] == 4


@pytest.fixture(scope="module")
def filled():
    return fill(one_layer(18432), load_cluster("h100-sxm8"), tp=8, micro_batch=1, seq_len=4096, version=NEWEST)


def test_a_layer_is_filled_for_every_gemm(filled) -> None:
    gemms = parse(filled.text)
    assert set(gemms) == set(GEMMS.values())
    for name, keys in gemms.items():
        assert set(keys) == KEYS
        assert 4096 % keys["num_splits"] == 0
        assert (keys["method"] == "ring_exchange") >= (name in GATHERS)
    assert all(entry.serial_s > 0 and entry.best is not None for entry in filled.gemms.values())


def test_the_published_file_of_this_layer_is_of_the_same_order(filled) -> None:
    """Ten GEMMs: gathers are rings, what is bulk is bulk, SMs are within a factor of ten of what was published."""
    gemms = parse(filled.text)
    for row in csv.DictReader(io.StringIO(PUBLISHED)):
        ours = gemms[row["gemm"]]
        if row["method"] in ("bulk", "ring_exchange"):
            assert ours["method"] == row["method"], row["gemm"]
        else:
            assert ours["method"] in ("pipeline", "ring_exchange"), row["gemm"]
        if row["num_sm"] and ours["method"] == row["method"]:
            assert 0.1 <= ours["num_sm"] / int(row["num_sm"]) <= 10, row["gemm"]


def test_bad_sizes_are_one_clear_error() -> None:
    with pytest.raises(UsageError, match="tp is 1; expected at least 2"):
        fill(one_layer(4096), load_cluster("h100-sxm8"), 1, 1, 4096, NEWEST)
    with pytest.raises(UsageError, match="no multiple of 128"):
        one_layer(1000)
    with pytest.raises(UsageError, match="expected a divisor"):
        one_layer(4096, heads=100)


def test_the_file_name_is_what_arguments_name() -> None:
    assert FILE in EMITTER.emit(subject("tp_overlap")).files
