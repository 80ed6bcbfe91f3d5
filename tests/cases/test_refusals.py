"""Where overlap does not pay: declined, with the cause, and `crossover` says from which row count it does."""

from __future__ import annotations

import json

import pytest

from overlapsim.cli.main import main
from tests.cases.test_operator_cases import operator

NONE = ("serial", "tie")
KINDS = ("all_reduce", "reduce_scatter", "all_to_all", "all_gather")


def crossover(capsys: pytest.CaptureFixture[str], text: str) -> dict:
    main(["crossover", *text.split(), "--json"])
    return json.loads(capsys.readouterr().out)


def shape(kind: str, m: int, wide: int, narrow: int) -> str:
    """A sharded layer: its collective carries `wide`, its GEMM's other size is `narrow`."""
    n, k = (narrow, wide) if kind == "all_gather" else (wide, narrow)
    return f"--m {m} --n {n} --k {k} --collective {kind}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_gemm_of_one_wave_is_not_cut(capsys, kind: str) -> None:
    answer = operator(capsys, f"--cluster rtx4090-pcie8 --ranks 4 {shape(kind, 64, 8192, 1024)}")
    assert (answer["verdict"], answer["cause"], answer["best"]) == ("serial", "under_one_wave", "serial")
    assert all(entry["reasons"] for entry in answer["strategies"] if not entry["applies"])


@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_do_not_pay_and_many_do(capsys, kind: str) -> None:
    """From an eager framework; the row count at which it turns is found, not a threshold."""
    n, k = (1024, 4096) if kind == "all_gather" else (4096, 1024)
    common = f"--cluster h100-sxm8 --ranks 8 --n {n} --k {k} --collective {kind} --stack eager"
    few = operator(capsys, f"{common} --m 256")
    assert few["verdict"] in NONE
    # Few rows may be gathered by the switch, before the GEMM: faster, but no overlap.
    assert few["best"] == ("async_tp" if kind == "all_gather" else "serial")
    assert few["cause"] in ("small_message", "few_tiles", "under_one_wave", "kernel_slower")
    found = crossover(capsys, f"{common} --m 256,1024,4096,16384,65536")
    assert found["pays_from_m"] > 256
    by_m = {point["m"]: point for point in found["points"]}
    assert by_m[256]["verdict"] in NONE and by_m[256]["cause"] == few["cause"]
    assert by_m[found["pays_from_m"]]["verdict"] == "overlap"
    assert by_m[found["pays_from_m"]]["cause"] == "none"
    assert found["but_not_at_m"] == [m for m in by_m if m > found["pays_from_m"] and by_m[m]["verdict"] != "overlap"]
    assert by_m[65536]["verdict"] == "overlap"


@pytest.mark.parametrize("kind", KINDS)
def test_communication_far_smaller_than_compute(capsys, kind: str) -> None:
    answer = operator(capsys, f"--cluster a800-sxm8 --ranks 2 {shape(kind, 8192, 8192, 131072)}")
    assert (answer["verdict"], answer["cause"], answer["best"]) == ("serial", "little_to_hide", "serial")
    assert answer["ceiling"] < 1.05


@pytest.mark.parametrize("kind", KINDS)
def test_communication_far_larger_than_compute(capsys, kind: str) -> None:
    answer = operator(capsys, f"--cluster rtx4090-pcie8 --ranks 8 {shape(kind, 8192, 8192, 128)}")
    assert (answer["verdict"], answer["cause"], answer["best"]) == ("serial", "link_bound", "serial")


def test_a_device_with_few_flop_hides_all_there_is_to_hide(capsys) -> None:
    """An H20 has NVLink of an H200 and a seventh of its FLOP: what pays on the one does not on the other."""
    question = f"--ranks 8 {shape('reduce_scatter', 8192, 8192, 4096)}"
    slow, fast = (operator(capsys, f"--cluster {name} {question}") for name in ("h20-sxm8", "h200-sxm8"))
    assert slow["ceiling"] < 1.1 < fast["ceiling"]
    assert slow["verdict"] in NONE
    assert fast["verdict"] == "overlap"


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_independent_pairs(capsys, kind: str) -> None:
    common = f"--cluster h100-sxm8 --ranks 8 --n 8192 --k 8192 --collective {kind}"
    tiny = operator(capsys, f"{common} --m 8192 --independent 64KiB")
    assert (tiny["verdict"], tiny["cause"]) == ("serial", "little_to_hide")
    huge = operator(capsys, f"{common} --m 64 --independent 4GiB")
    assert huge["verdict"] in NONE and huge["cause"] == "link_bound"
    found = crossover(capsys, f"{common} --independent 64MiB --m 64,1024,8192,262144")
    assert [point["verdict"] for point in found["points"]][1:3] == ["overlap", "overlap"]
    assert found["points"][-1]["cause"] == "little_to_hide"
    assert found["but_not_at_m"][-1] == 262144


def test_collectives_that_no_strategy_takes_say_so(capsys) -> None:
    answer = operator(capsys, "--cluster h100-sxm8 --ranks 8 --m 4096 --n 4096 --k 4096 --collective broadcast")
    assert answer["verdict"] == "serial" and answer["best"] == "serial"
    assert all(entry["reasons"] for entry in answer["strategies"] if entry["name"] != "serial")


def test_an_unsure_gain_does_not_beat_a_sure_one(capsys) -> None:
    """What others measured of a fused kernel on an A800 is far less than the model says; chunks are sure."""
    answer = operator(
        capsys, f"--cluster a800-sxm8 --ranks 2 {shape('reduce_scatter', 16384, 8192, 8192)} --dtype fp16"
    )
    by_name = {entry["name"]: entry for entry in answer["strategies"] if entry["applies"]}
    best = by_name[answer["best"]]
    assert answer["verdict"] == "overlap"
    assert by_name["fused_tiles"]["speedup"] > best["speedup"] > 1.02
    assert by_name["fused_tiles"]["speedup_low"] < 1 < best["speedup_low"]
