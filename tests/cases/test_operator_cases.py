"""Questions that users asked in public about one GEMM and its collective, as the command line answers them."""

from __future__ import annotations

import json

import pytest

from overlapsim.cli.main import main


def operator(capsys: pytest.CaptureFixture[str], text: str) -> dict:
    main(["operator", *text.split(), "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8])
def test_flashoverlap_issue_5_slow_template_on_h100(capsys, ranks: int) -> None:
    """H100, 4096 x 12288 x 49152, vendor GEMM and collective 7.88 ms, signalled kernel 11.25 ms: do not overlap."""
    answer = operator(
        capsys,
        f"--cluster h100-sxm8 --ranks {ranks} --m 4096 --n 12288 --k 49152 --dtype fp16 --collective reduce_scatter "
        "--gemm-time 7.59e-3 --kernel-time wave_group=11.25e-3",
    )
    assert (answer["verdict"], answer["cause"]) == ("serial", "kernel_slower")
    assert answer["ceiling"] == pytest.approx(1.04, abs=0.02)
    wave_group = next(entry for entry in answer["strategies"] if entry["name"] == "wave_group")
    assert wave_group["speedup"] < 0.75


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_flux_issue_111_small_m_on_4090(capsys, ranks: int) -> None:
    """RTX 4090, 64 x 8192 x 7168 GEMM + ReduceScatter: fused 0.68 ms against 0.28 ms; under one wave."""
    answer = operator(
        capsys,
        f"--cluster rtx4090-pcie8 --ranks {ranks} --m 64 --n 8192 --k 7168 --dtype fp16 --collective reduce_scatter",
    )
    assert (answer["verdict"], answer["cause"], answer["best"]) == ("serial", "under_one_wave", "serial")
    assert all(not entry["applies"] for entry in answer["strategies"] if entry["name"] != "serial")


def test_moore_threads_port_small_square(capsys) -> None:
    """M = N = K = 4096 on two GPUs with a template 2.7 times slower than the vendor's: speed-up 0.62, the kernel's."""
    answer = operator(
        capsys,
        "--cluster a800-sxm8 --ranks 2 --m 4096 --n 4096 --k 4096 --dtype fp16 --accumulate fp16 "
        "--gemm-time 0.47ms --kernel-time wave_group=1.27ms --strategy wave_group",
    )
    assert answer["cause"] == "kernel_slower"
    assert answer["verdict"] == "serial"
