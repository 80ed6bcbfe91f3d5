"""vLLM and SGLang: golden files, degrees, experts, what has no counterpart."""

from __future__ import annotations

import pytest

from overlapsim.emit.base import Emitted
from overlapsim.emit.sglang import EMITTER as SGLANG
from overlapsim.emit.vllm import EMITTER as VLLM
from overlapsim.errors import PlanError
from tests.emit.subjects import PLANS, changed, check_golden, subject


def flags(emitted: Emitted) -> dict[str, str]:
    (text,) = emitted.files.values()
    pairs = (line.partition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: value for name, _, value in pairs}


@pytest.mark.parametrize("name", PLANS)
def test_golden(name: str) -> None:
    check_golden(f"vllm-{name}", VLLM.emit(subject(name)))
    check_golden(f"sglang-{name}", SGLANG.emit(subject(name)))


@pytest.mark.parametrize("name", PLANS)
def test_degrees_come_back(name: str) -> None:
    layout = subject(name).layout
    given = flags(VLLM.emit(subject(name)))
    degrees = [int(given[f"--{key}-parallel-size"]) for key in ("tensor", "pipeline")]
    assert degrees == [layout.tp, layout.pp]
    dp, cp = int(given.get("--data-parallel-size", 1)), int(given.get("--prefill-context-parallel-size", 1))
    assert (dp, cp) == ((1 if layout.cp > 1 else layout.dp), layout.cp)
    given = flags(SGLANG.emit(subject(name)))
    spread = "--enable-dp-attention" in given
    ranks = int(given["--tp-size"]) * int(given["--pp-size"]) * (1 if spread else int(given["--dp-size"]))
    assert ranks == layout.world_size


def test_experts_on_all_ranks_is_said_where_the_plan_has_fewer() -> None:
    emitted = VLLM.emit(subject("moe"))
    assert "--enable-expert-parallel" in flags(emitted)
    assert any("ep=8" in line for line in emitted.unexpressed)
    assert flags(SGLANG.emit(subject("moe")))["--ep-size"] == flags(SGLANG.emit(subject("moe")))["--tp-size"]
    whole = changed("moe", {"ep": 32})
    assert not any("ep=" in line for line in VLLM.emit(whole).unexpressed)


def test_two_micro_batches_take_a_backend_that_can() -> None:
    given = flags(VLLM.emit(changed("moe", {"pp": 2, "vpp": 2, "dp": 16}, schedule="dualpipev")))
    assert given["--all2all-backend"] == "deepep_high_throughput"
    assert "--enable-dbo" in given
    assert "--enable-dbo" not in flags(VLLM.emit(subject("moe")))


def test_what_serving_has_not_is_said() -> None:
    for emitter in (VLLM, SGLANG):
        said = " ".join(emitter.emit(subject("dense")).unexpressed)
        for word in ("training step", "zero=1", "interleaved", "fused_tiles"):
            assert word in said
        assert [f.code for f in emitter.emit(subject("dense")).findings] == ["weights_open"]
        with pytest.raises(PlanError, match="Ulysses"):
            emitter.emit(changed("fsdp", {"sp": 2, "dp": 8}))
        codes = [f.code for f in emitter.emit(subject("dense"), "99.1").findings]
        assert codes[0] == "framework_version_unknown"
