"""Kernels compile for five architectures, fit, and signal; what does not is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

TIMEOUT_S = 900
SIGNALS = """
import json
import triton
import triton.language as tl
from overlapsim.validate.kernels.architectures import ARCHITECTURES
from overlapsim.validate.kernels.compiling import Variant, compile_for
from overlapsim.validate.kernels.config import GemmConfig
from overlapsim.validate.kernels.ptx_checks import STORE, acquire_problems, signal_problems
from overlapsim.validate.kernels.variants import gemm_variant

@triton.jit
def relaxed(x, c):
    tl.store(x + tl.arange(0, 1024), 1)
    tl.debug_barrier()
    tl.atomic_add(c, 1, sem="relaxed", scope="gpu")

@triton.jit
def late(x, c):
    tl.atomic_add(c, 1, sem="release", scope="gpu")
    tl.store(x + tl.arange(0, 1024), 1)

@triton.jit
def block_scope(x, c):
    tl.store(x + tl.arange(0, 1024), 1)
    tl.debug_barrier()
    tl.atomic_add(c, 1, sem="release", scope="cta")

@triton.jit
def careless(x, c):
    while tl.atomic_add(c, 0, sem="relaxed", scope="gpu") < 1:
        pass
    tl.store(x + tl.arange(0, 1024), 1)

sm_90 = ARCHITECTURES[3]
found = {}
for kernel in (relaxed, late, block_scope, careless):
    ptx = compile_for(Variant(kernel.__name__, kernel, {"x": "*i32", "c": "*i32"}, {}), sm_90).ptx
    found[kernel.__name__] = (signal_problems(ptx), acquire_problems(ptx))
aligned = compile_for(gemm_variant(GemmConfig(128, 128, 64), "bf16", by_row=True, experts=True), sm_90).ptx
found["aligned"] = sorted(set(STORE.findall(aligned)))
print(json.dumps(found))
"""


def python(*arguments: str, interpreted: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a process in which kernels are loaded for the compiler."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1"} | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def matrix(*arguments: str, interpreted: bool = False) -> subprocess.CompletedProcess[str]:
    return python("-m", "overlapsim.validate", "compile-matrix", *arguments, interpreted=interpreted)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100"])
def test_every_kernel_compiles_fits_and_signals(architecture: str) -> None:
    answer = matrix("--arch", architecture, "--json")
    assert answer.returncode == 0, answer.stderr
    rows = json.loads(answer.stdout)
    assert len(rows) == len({row["kernel"] for row in rows}) >= 16
    for row in rows:
        assert row["architecture"] == architecture and not row["problems"], row
        assert 0 < row["registers"] <= 255 and row["shared_bytes"] <= row["shared_limit_bytes"]
        assert row["blocks_per_sm"] >= 1
    by_name = {row["kernel"]: row for row in rows}
    assert by_name["hold"]["blocks_per_sm"] == 1
    # A waiting block must find room beside a GEMM that leaves few registers.
    waiter = by_name["wait"]
    assert waiter["warps"] == 1 and waiter["registers"] <= 32 and waiter["shared_bytes"] == 0


def test_what_an_architecture_cannot_launch_is_named() -> None:
    answer = matrix("--tile", "256x128x64", "--stages", "4", "--arch", "sm_89", "--arch", "sm_90", "--json")
    assert answer.returncode == 2
    assert "sm_89, gemm bf16 256x128x64, 4 stages: " in answer.stderr
    assert "needs 147456 bytes of shared memory a block; sm_89 has 101376" in answer.stderr
    assert "take a smaller tile or fewer stages" in answer.stderr
    refused = {row["architecture"]: bool(row["problems"]) for row in json.loads(answer.stdout)}
    assert refused == {"sm_89": True, "sm_90": False}


def test_wrong_signals_are_seen(tmp_path: Path) -> None:
    # Triton reads the source of kernels, so they must stand in a file.
    file = tmp_path / "kernels.py"
    file.write_text(SIGNALS)
    answer = python(str(file))
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert "no release" in found["relaxed"][0][0]
    assert found["late"][0] == ["a store stands behind the count"]
    assert "without device scope" in found["block_scope"][0][0]
    assert "no acquire" in found["careless"][1][0]
    # Rows start at multiples of 16 elements, and the compiler was told.
    assert found["aligned"] and all(store.startswith("st.global.v4") for store in found["aligned"])


def test_usage_errors() -> None:
    assert "expected one of sm_80, sm_86" in matrix("--arch", "sm_70").stderr
    assert "expected BMxBNxBK" in matrix("--tile", "128x128").stderr
    assert "bm is 100" in matrix("--tile", "100x128x64").stderr
    assert "unset TRITON_INTERPRET" in matrix("--arch", "sm_80", interpreted=True).stderr


def test_limits_are_those_of_the_profiles() -> None:
    from overlapsim.validate.kernels.architectures import ARCHITECTURES

    kib = {target.name: target.shared_limit_bytes / 1024 for target in ARCHITECTURES}
    assert kib == {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227}
