"""Specs: what they mean, and one clear error for what they cannot."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from overlapsim.cli.main import COMMANDS
from overlapsim.errors import OverlapSimError, UsageError
from overlapsim.sweep.keys import REQUIRED
from overlapsim.sweep.kinds import KINDS
from overlapsim.sweep.spec import parse_sweep, read_sweep
from tests.sweep.parts import operators

STEP = """
kind: sweep
command: simulate
common: {model: llama2-7b, cluster: a100-sxm8, global_batch: 16, seq: 2048}
"""


def test_grid_then_points() -> None:
    text = STEP + "grid: {nodes: [1, 2], layout: ['tp=2', 'tp=4']}\npoints: [{layout: 'tp=8', seq: 4096}, {}]\n"
    sweep = parse_sweep(text)
    given = [sweep.given(point) for point in sweep.points]
    assert [(g["nodes"], g["layout"]) for g in given] == [
        *((1, "tp=2"), (1, "tp=4"), (2, "tp=2"), (2, "tp=4")),
        *((1, "tp=8"), (1, "")),
    ]
    assert [g["seq"] for g in given] == [2048] * 4 + [4096, 2048]
    assert all(g["recompute"] == "none" and g["bucket_size"] == 160e6 for g in given)
    assert len({point.id for point in sweep.points}) == 6


def test_equal_points_are_one_however_they_are_written() -> None:
    text = STEP + "points: [{}, {nodes: 1}, {bucket_size: 160MB, sustained_clock: 1}, {p2p: null}, {nodes: 2}]\n"
    sweep = parse_sweep(text)
    assert (len(sweep.points), sweep.repeated) == (2, 3)
    again = parse_sweep(STEP + "grid: {nodes: [2, 1]}\n")
    assert [point.id for point in again.points] == [point.id for point in reversed(sweep.points)]


def test_every_value_is_part_of_the_id() -> None:
    other = {"nodes": 2, "layout": "tp=2", "micro_batch": 2, "recompute": "full", "ranges": False, "seq": 1024}
    other |= {
        "overlap": "mlp.fc2=chunked:chunks=2",
        "dtype": "fp16",
        "reshard": False,
        "perturb": "jitter=0.1",
        "model": "llama3-8b",
        "cluster": "h100-sxm8",
    }
    points = [{}, *({key: value} for key, value in other.items())]
    sweep = parse_sweep(STEP + f"points: {json.dumps(points)}\n")
    assert (len(sweep.points), sweep.repeated) == (len(points), 0)


def test_contents_of_files_decide_not_their_names(tmp_path: Path) -> None:
    """A model file elsewhere is the same point; one whose contents changed is another."""
    config = {
        **{"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8},
        **{"intermediate_size": 2816, "vocab_size": 32000, "max_position_embeddings": 4096},
    }
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "own.json").write_text(json.dumps(config))
    (tmp_path / "own.json").write_text(json.dumps(config))
    spec = tmp_path / "spec.yaml"
    text = STEP + "points: [{}]\n"
    ids = []
    for name in ("own.json", "here/own.json"):
        spec.write_text(text.replace("llama2-7b", name))
        ids.append(read_sweep(spec).points[0].id)  # from the spec's folder
    assert ids[0] == ids[1]
    (tmp_path / "own.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    spec.write_text(text.replace("llama2-7b", "own.json"))
    assert read_sweep(spec).points[0].id != ids[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty; expected kind: sweep"),
        ("kind: plan", "no spec of a sweep"),
        ("{kind: sweep, command: [", "is not YAML: line 2"),
        ("kind: sweep\nkind: sweep", "twice"),
        ("{kind: sweep, command: guess}", "command is 'guess'; expected one of plan, simulate, operator"),
        ("{kind: sweep, command: plan, grids: {}}", "unknown key grids; did you mean grid?"),
        (STEP, "there are no points; expected grid, points or both"),
        (STEP + "grid: {nodes: 2}", "grid.nodes is 2; expected a list of values"),
        (STEP + "grid: {nodes: []}", "grid.nodes is []; expected a list"),
        (STEP + "grid: {nodes: [1, two]}", "grid.nodes[1] is 'two'; expected a whole number from 1"),
        (STEP + "grid: {nodes: [true]}", "grid.nodes[0] is True; expected a whole number"),
        (STEP + "grid: {node: [1]}", "unknown key grid.node; did you mean nodes?"),
        (STEP + "grid: {seq: [1024]}", "seq stands in common and in grid"),
        (STEP + "grid: [1]", "grid is [1]; expected a mapping"),
        (STEP + "points: {nodes: 1}", "expected a list of points"),
        (STEP + "points: [3]", "points[0] is 3; expected a mapping"),
        (STEP + "points: [{}, {nodes: [1, 2]}]", "points[1].nodes is [1, 2]; expected one value"),
        (STEP + "points: [{bucket_size: 3 apples}]", "points[0].bucket_size: '3 apples' has unit 'apples'"),
        (STEP + "points: [{bucket_size: 0}]", "points[0].bucket_size is 0; expected a quantity above 0"),
        (STEP + "points: [{recompute: most}]", "points[0].recompute: recompute modules most are unknown"),
        (STEP + "points: [{overlap: mlp.fc2=chunk:chunks=2}]", "points[0].overlap: strategy 'chunk' is unknown; did"),
        (STEP + "points: [{schedule: 1f2b}]", "points[0].schedule is '1f2b'; expected one of"),
        (STEP + "points: [{sustained_clock: 1.2}]", "expected a share in (0, 1]"),
        (STEP + "points: [{ranges: 1}]", "points[0].ranges is 1; expected true or false"),
        (STEP + 'points: [{layout: "tp=2\\ntp=4"}]', "expected a text of one line"),
        (STEP.replace("seq: 2048", "nodes: 1") + "grid: {micro_batch: [1]}", "grid has no seq; give them there"),
        (STEP.replace("seq: 2048", "nodes: 1") + "points: [{}]", "points[0] has no seq"),
        (STEP.replace("llama2-7b", "''") + "points: [{}]", "common.model is ''; expected a text that is not empty"),
        (STEP.replace("llama2-7b", "llama2-7c") + "points: [{}]", "model 'llama2-7c' is unknown"),
        (STEP.replace("a100-sxm8", "a100") + "points: [{}]", "a100"),
        (operators("[64]").replace("quick", "quick, strategy: wavegroup"), "did you mean 'wave_group'"),
        (STEP + f"grid: {{nodes: {list(range(1, 501))}, micro_batch: {list(range(1, 501))}}}", "250,000 points"),
    ],
)
def test_bad_specs_are_one_clear_error(text: str, said: str) -> None:
    with pytest.raises(OverlapSimError) as caught:
        parse_sweep(text, "s.yaml")
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_specs_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot read sweep"):
        read_sweep(tmp_path / name)


# Outputs, and options that have another form in a spec: a flag `--no-x` is `x`, `--virtual` is the layout's vpp.
OUTPUTS = {"json", "trace", "plot", "output", "emit"}
ELSEWHERE = {
    # Serving steps have other columns.
    "simulate": {"virtual", "phase", "batch", "past", "context", "decodes", "kv_dtype"},
    "plan": {"fix"},
    # Measured times and shapes of one GEMM, which a grid has no use for.
    "operator": {"kernel_time", "tile", "curve", "rank_rows"},
}


@pytest.mark.parametrize("command", list(KINDS))
def test_keys_are_the_options_of_the_command(command: str) -> None:
    """An option that the command learns must become a key, with the same default."""
    click_command = importlib.import_module(COMMANDS[command][0]).command
    keys = {key.name: key for key in KINDS[command].keys}
    names = set()
    for parameter in click_command.params:
        option = max(parameter.opts, key=len).lstrip("-").replace("-", "_")
        if option in OUTPUTS | ELSEWHERE[command]:
            continue
        name = option.removeprefix("no_")
        assert name in keys, f"--{option} is no key of a sweep"
        names.add(name)
        assert keys[name].default is REQUIRED or not parameter.required
        if isinstance(parameter.default, str | int | float) and parameter.default and name == option:
            assert keys[name].default == parameter.default
    assert set(keys) - names <= {"ranges", "effort"}  # what a sweep can leave out to be faster
