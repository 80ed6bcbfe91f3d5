"""torchtitan: golden files of six plans in both dialects, the way back to a layout, schedules, what is refused."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.emit.base import Emitted
from overlapsim.emit.rules import Version
from overlapsim.emit.torchtitan import EMITTER, SCHEDULE_FILE
from overlapsim.emit.torchtitan_models import FLAVORS
from overlapsim.emit.torchtitan_read import read_python, read_toml, reading
from overlapsim.errors import LayoutError, PlanError
from overlapsim.schedule.pipeline_csv import schedule_from_csv
from overlapsim.schedule.pipeline_kinds import make_schedule
from overlapsim.workload.layout import Layout
from overlapsim.workload.presets import load_preset
from tests.emit.subjects import PLANS, asked, changed, check_golden, subject

DIALECTS = ("0.2.2", "0.3.0")


def read_back(emitted: Emitted, version: str) -> Layout:
    if version == "0.2.2":
        config = read_toml(emitted.files["torchtitan.toml"], Version.parse(version))
    else:
        config = read_python(emitted.files["torchtitan_plan.py"], Version.parse(version))
    return reading(config, None).layout


def sayable(layout: Layout) -> Layout:
    """The layout as torchtitan runs it: FSDP2 knows ZeRO 3, and ZeRO 2 where parameters stay gathered."""
    sharded = layout.dp // layout.hsdp > 1 or layout.cp > 1
    alone = layout.world_size == layout.dp and layout.ep == 1
    zero = 0 if not sharded or (layout.zero == 0 and alone) else 3 if layout.zero == 3 else 2
    return replace(layout, zero=zero, hsdp=layout.hsdp if zero else 1)


@pytest.mark.parametrize("version", DIALECTS)
@pytest.mark.parametrize("name", PLANS)
def test_golden(name: str, version: str) -> None:
    check_golden(f"torchtitan-{version}-{name}", EMITTER.emit(subject(name), version))


@pytest.mark.parametrize("version", DIALECTS)
@pytest.mark.parametrize("name", PLANS)
def test_reading_gives_the_layout_back(name: str, version: str) -> None:
    base = subject(name)
    emitted = EMITTER.emit(base, version)
    assert read_back(emitted, version) == sayable(base.layout)
    told = any("zero=" in line for line in emitted.unexpressed)
    assert told == (base.layout.zero < 3 and base.layout.dp * base.layout.cp > 1)


def test_all_of_a_fully_sharded_plan_comes_back() -> None:
    assert read_back(EMITTER.emit(subject("fsdp"), "0.2.2"), "0.2.2") == subject("fsdp").layout


@settings(deadline=None, max_examples=150)
@given(
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2, 4]),
    vpp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2, 4, 8]),
    hsdp=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
    whole=st.booleans(),
    version=st.sampled_from(DIALECTS),
)
def test_any_layout_comes_back(
    tp: int, cp: int, pp: int, vpp: int, dp: int, hsdp: int, zero: int, whole: bool, version: str
) -> None:
    degrees = {"tp": tp, "cp": cp, "pp": pp, "vpp": vpp if pp > 1 else 1, "dp": dp, "zero": zero, "etp": tp}
    degrees["hsdp"] = hsdp if zero and dp % hsdp == 0 else 1
    layout = Layout(**degrees)
    named = "interleaved" if degrees["vpp"] > 1 else "1f1b"
    base = changed("fsdp", {name: getattr(layout, name) for name in layout.__dict__}, schedule=named)
    if whole:
        base = asked(base, model="my-model.yaml")  # stages are then listed by their modules
    assert read_back(EMITTER.emit(base, version), version) == sayable(layout)


@pytest.mark.parametrize("version", DIALECTS)
def test_a_schedule_without_a_name_becomes_a_file(version: str) -> None:
    base = subject("pipeline")
    assert base.settings.schedule == "zb_h2"
    emitted = EMITTER.emit(base, version)
    found = schedule_from_csv(emitted.files[SCHEDULE_FILE])
    made = make_schedule("zb_h2", 4, base.settings.num_micro_batches)
    assert [list(found.slots(rank)) for rank in range(4)] == [list(made.slots(rank)) for rank in range(4)]
    config = emitted.files["torchtitan.toml" if version == "0.2.2" else "torchtitan_plan.py"]
    assert SCHEDULE_FILE in config
    assert EMITTER.emit(subject("dense"), version).files.keys().isdisjoint({SCHEDULE_FILE})


def test_uneven_stages_list_their_modules() -> None:
    layers = (18, 21, 21, 20)
    base = changed("dense", {"vpp": 1}, schedule="1f1b", stage_layers=layers)
    content = tomllib.loads(EMITTER.emit(base, "0.2.2").files["torchtitan.toml"])["parallelism"]
    parts = content["module_fqns_per_model_part"]
    assert [sum(name.startswith("layers.") for name in part) for part in parts] == list(layers)
    assert [name for part in parts for name in part if name.startswith("layers.")] == [f"layers.{i}" for i in range(80)]
    assert (parts[0][0], parts[-1][-2:]) == ("tok_embeddings", ["norm", "output"])
    assert "pipeline_parallel_layers_per_stage" not in content
    assert "lm_head" in EMITTER.emit(base, "0.3.0").files["torchtitan_plan.py"]


def test_batches_follow_from_micro_batches() -> None:
    content = tomllib.loads(EMITTER.emit(subject("dense"), "0.2.2").files["torchtitan.toml"])
    assert content["training"] == {"local_batch_size": 64, "global_batch_size": 128, "seq_len": 8192}
    assert content["parallelism"]["pipeline_parallel_microbatch_size"] == 1
    # Without a pipeline a local batch is one micro-batch; the rest is accumulated.
    content = tomllib.loads(EMITTER.emit(subject("fsdp"), "0.2.2").files["torchtitan.toml"])
    assert content["training"]["local_batch_size"] == 1
    assert content["training"]["global_batch_size"] == 64


def test_async_tp_needs_compiled_stages() -> None:
    emitted = EMITTER.emit(subject("dense"), "0.2.2")
    content = tomllib.loads(emitted.files["torchtitan.toml"])
    assert content["compile"] == {"enable": True, "components": ["model", "loss"]}
    assert content["parallelism"]["enable_async_tensor_parallel"] is True
    text = EMITTER.emit(subject("dense"), "0.3.0").files["torchtitan_plan.py"]
    call = next(
        n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "CompileConfig"
    )
    assert {kw.arg for kw in call.keywords} == {"enable", "components", "enable_async_tensor_parallel"}
    # A split backward leaves stages eager: nothing is compiled, and that is said.
    parted = changed("dense", {"vpp": 1}, schedule="zb_h1")
    emitted = EMITTER.emit(parted, "0.2.2")
    assert "compile" not in tomllib.loads(emitted.files["torchtitan.toml"])
    assert any("refuses compiled stages" in line for line in emitted.unexpressed)


def test_every_strategy_that_it_has_not_is_named() -> None:
    for name in PLANS:
        base = subject(name)
        said = " ".join(EMITTER.emit(base, "0.2.2").unexpressed)
        for op in base.entry.operators:
            if op.strategy != "async_tp":
                assert f"has no {op.strategy}" in said
                assert f"{op.operator} {op.pass_}" in said


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (lambda: changed("fsdp", {"sp": 2, "dp": 8}), "Ulysses"),
        (lambda: changed("dense", {"vpp": 1}, schedule="dualpipe"), "two copies"),
        (lambda: asked(subject("long_context"), seq_len=131088), "do not divide"),
        (lambda: changed("moe", {"tp": 4, "etp": 2, "ep": 8, "dp": 8}), "etp=2"),
    ],
)
def test_what_it_cannot_run_is_refused(base: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        EMITTER.emit(base(), "0.2.2")  # type: ignore[operator]


def test_split_experts_went_with_the_toml() -> None:
    base = changed("moe", {"tp": 2, "etp": 2, "ep": 8, "dp": 16})
    content = tomllib.loads(EMITTER.emit(base, "0.2.2").files["torchtitan.toml"])
    assert content["parallelism"]["expert_tensor_parallel_degree"] == 2
    with pytest.raises(PlanError, match="etp=1"):
        EMITTER.emit(base, "0.3.0")


def test_versions_that_were_not_looked_at_are_findings() -> None:
    old, new = EMITTER.emit(subject("fsdp"), "0.1"), EMITTER.emit(subject("fsdp"), "0.9")
    assert [f.code for f in old.findings] == ["framework_version_stale", "data_open"]
    assert [f.code for f in new.findings] == ["framework_version_unknown", "batches_in_tokens"]
    assert list(old.files) == ["torchtitan.toml"]
    assert list(new.files) == ["torchtitan_plan.py"]


def test_a_model_of_ones_own_is_left_open_loudly() -> None:
    base = asked(subject("fsdp"), model="my-model.yaml")
    emitted = EMITTER.emit(base, "0.3.0")
    assert "NotImplementedError" in emitted.files["torchtitan_plan.py"]
    assert "model_not_in_framework" in [f.code for f in emitted.findings]
    content = tomllib.loads(EMITTER.emit(base, "0.2.2").files["torchtitan.toml"])
    assert content["model"]["flavor"] == base.spec.name


def test_flavors_are_presets() -> None:
    for name in FLAVORS:
        assert load_preset(name).num_layers > 1


def test_degrees_that_make_no_layout() -> None:
    text = "[parallelism]\nexpert_parallel_degree = 3\ndata_parallel_shard_degree = 4\n"
    with pytest.raises(LayoutError):
        reading(read_toml(text, Version.parse("0.2.2")), None)


def test_rank_order_recomputation_and_fp8_are_said() -> None:
    order = ("tp", "sp", "cp", "ep", "pp", "dp")
    said = EMITTER.emit(changed("dense", rank_order=order), "0.2.2").unexpressed
    assert any("tp-dp-pp" in line and "tp-pp-dp" in line for line in said)
    assert not any("fills ranks" in line for line in EMITTER.emit(subject("dense"), "0.2.2").unexpressed)
    chosen = {"recompute": "selective", "recompute_modules": ("core_attn",)}
    emitted = EMITTER.emit(changed("dense", **chosen), "0.2.2")
    content = tomllib.loads(emitted.files["torchtitan.toml"])
    assert content["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}
    assert any("core_attn" in line for line in emitted.unexpressed)
    text = EMITTER.emit(changed("dense", **chosen), "0.3.0").files["torchtitan_plan.py"]
    assert "SelectiveAC.Config()" in text
    content = tomllib.loads(EMITTER.emit(changed("dense", fp8=True), "0.2.2").files["torchtitan.toml"])
    assert content["model"]["converters"] == ["quantize.linear.float8"]
    assert content["quantize"]["linear"]["float8"] == {"recipe_name": "rowwise"}
    assert any(
        "Float8LinearConverter" in line for line in EMITTER.emit(changed("dense", fp8=True), "0.3.0").unexpressed
    )


def test_strategies_of_whole_graphs_and_kept_parameters() -> None:
    base = changed("dense", arranging=(("wgrad_delay", {"pending": 2}),))
    assert any("wgrad_delay (pending 2)" in line for line in EMITTER.emit(base, "0.2.2").unexpressed)
    kept = EMITTER.emit(changed("fsdp", reshard=False), "0.2.2").files["torchtitan.toml"]
    assert tomllib.loads(kept)["parallelism"]["fsdp_reshard_after_forward"] == "never"
    alone = tomllib.loads(EMITTER.emit(changed("fsdp", {"zero": 0}), "0.2.2").files["torchtitan.toml"])["parallelism"]
    assert (alone["data_parallel_replicate_degree"], alone["data_parallel_shard_degree"]) == (16, 1)
