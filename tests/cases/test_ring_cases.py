"""Questions that users asked in public about gathers decomposed by ranks, as the command line answers them."""

from __future__ import annotations

import pytest

from tests.cases.test_operator_cases import operator

# github.com/pytorch/pytorch pull request 143160: M 2048, N 3584, K 8192 over 8 ranks, n and k of one rank.
PYTORCH_143160 = "--ranks 8 --m 2048 --n 3584 --k 8192 --collective all_gather"
# github.com/bytedance/flux issue 111: the gather before a GEMM of 56 tiles of 64x128 on four RTX 4090.
FLUX_111 = "--cluster rtx4090-pcie8 --ranks 4 --m 64 --n 7168 --k 8192 --dtype fp16 --collective all_gather"


def speedups(answer: dict) -> dict[str, float]:
    return {entry["name"]: entry["speedup"] for entry in answer["strategies"] if entry["applies"]}


@pytest.mark.parametrize("cluster", ["a100-sxm8", "h100-sxm8"])
def test_a_ring_of_256_rows_loses_by_its_few_tiles(capsys, cluster: str) -> None:
    """301 us in series, 354 in pieces of a rank's rows: each has a fraction of the tiles that fill the SMs."""
    answer = operator(capsys, f"--cluster {cluster} {PYTORCH_143160} --strategy serial --strategy ring_exchange")
    assert answer["verdict"] in ("serial", "tie")
    assert (answer["best"], answer["cause"]) == ("serial", "few_tiles")
    assert 0.8 < speedups(answer)["ring_exchange"] < 1
    assert answer["ceiling"] > 1.3  # there was something to hide
    (finding,) = [f for f in answer["findings"] if f["code"] == "few_tiles"]
    assert "8 GEMMs" in finding["message"]


@pytest.mark.parametrize("cluster", ["a100-sxm8", "h100-sxm8"])
def test_a_kernel_that_knows_of_arrivals_beats_the_ring(capsys, cluster: str) -> None:
    """295 us by a kernel that waits for arriving rows, 277 by the switch's multicast."""
    answer = operator(capsys, f"--cluster {cluster} {PYTORCH_143160}")
    found = speedups(answer)
    assert found["ring_exchange"] < min(found["serial"], found["fused_tiles"])
    assert answer["best"] != "ring_exchange"
    if cluster == "h100-sxm8":
        # Few rows are gathered by the switch: better than in series, and than in pieces.
        assert found["ring_exchange"] < 1 < found["async_tp"]
    else:
        assert found["async_tp"] < 1
    assert "few_tiles" in {finding["code"] for finding in answer["findings"]}


def test_pieces_of_an_async_gather_lose_where_no_switch_gathers(capsys) -> None:
    answer = operator(capsys, f"--cluster a100-sxm8 {PYTORCH_143160} --strategy serial --strategy async_tp")
    assert answer["verdict"] in ("serial", "tie")
    assert answer["cause"] == "few_tiles"


def test_one_wave_is_not_cut(capsys) -> None:
    """0.213 ms in series, 0.240 fused, 0.201 at best with smaller tiles."""
    answer = operator(capsys, FLUX_111)
    assert (answer["verdict"], answer["cause"], answer["best"]) == ("serial", "under_one_wave", "serial")
    assert not {"ring_exchange", "async_tp", "pipelined_rs", "chunked"} & set(speedups(answer))
