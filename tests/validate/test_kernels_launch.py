"""Launches outside the interpreter: what cannot run here is refused in words, and resources that lack are named."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are loaded for the interpreter", allow_module_level=True)

from overlapsim.validate.kernels import checks  # noqa: E402
from overlapsim.validate.kernels.architectures import ARCHITECTURES, architecture, blocks_per_sm  # noqa: E402
from overlapsim.validate.kernels.launch import (  # noqa: E402
    GemmConfig,
    RestoreOrder,
    TileOrder,
    new_counters,
    new_status,
    restored_add,
    signalled_gemm,
    wait_group,
)
from triton.runtime.errors import OutOfResources  # noqa: E402

from overlapsim.cost.tiles import TileGrid  # noqa: E402
from overlapsim.errors import StrategyError, UsageError  # noqa: E402
from overlapsim.schedule.reorder import collective_map  # noqa: E402


def test_cpu_tensors_need_the_interpreter() -> None:
    reorder = collective_map("all_reduce", TileGrid(32, 32, 16, 16), (4,), ranks=2)
    order = TileOrder.from_map(reorder, GemmConfig(16, 16, 16))
    a = torch.zeros(32, 32)
    for call in (
        lambda: signalled_gemm(a, a, torch.zeros(1024), order, new_counters(1)),
        lambda: restored_add(torch.zeros(1024), RestoreOrder.from_map(reorder), None, a),
        lambda: wait_group(new_counters(1), 0, 1, new_status(1)),
    ):
        with pytest.raises(StrategyError, match="set TRITON_INTERPRET=1 before"):
            call()


class Greedy:
    """A kernel that needs more than the GPU has."""

    __name__ = "gemm_kernel"

    def __getitem__(self, programs: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            # Fused multiply-adds are asked for, whatever the default of the version.
            assert options["enable_fp_fusion"] is True
            raise OutOfResources(196608, 101376, "shared memory")

        return launch


def test_a_kernel_too_large_for_the_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    message = r"gemm_kernel needs 196608 of shared memory; NVIDIA L40S \(sm_89\) has 101376: take a smaller tile"
    with pytest.raises(StrategyError, match=message):
        checks.launch(Greedy(), (1,), (), {"num_warps": 8}, torch.device("cuda", 0))


def test_blocks_of_an_sm_are_limited_by_each_resource() -> None:
    sm_80, sm_86 = ARCHITECTURES[0], ARCHITECTURES[1]
    assert blocks_per_sm(sm_80, registers=128, warps=4, shared_bytes=0) == 4  # registers
    assert blocks_per_sm(sm_80, registers=32, warps=4, shared_bytes=80 * 1024) == 2  # shared memory
    assert blocks_per_sm(sm_86, registers=32, warps=16, shared_bytes=0) == 3  # threads
    assert blocks_per_sm(sm_86, registers=16, warps=1, shared_bytes=0) == 16  # blocks
    assert blocks_per_sm(sm_80, registers=255, warps=16, shared_bytes=0) == 0
    with pytest.raises(UsageError, match="expected one of sm_80"):
        architecture("sm_75")
