"""What tensor parallelism pads: vocabulary and heads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapsim.errors import LayoutError, WorkloadError
from overlapsim.workload.model import Attention
from overlapsim.workload.vocabulary import local_heads, padded_vocabulary


@pytest.mark.parametrize(
    ("vocabulary", "tp", "padded"),
    [(50257, 1, 50304), (50257, 2, 50432), (50257, 4, 50688), (50257, 8, 51200), (51200, 8, 51200), (1, 1, 128)],
)
def test_megatrons_padding(vocabulary: int, tp: int, padded: int) -> None:
    assert padded_vocabulary(vocabulary, tp) == padded


@given(st.integers(1, 10**6), st.integers(1, 128), st.integers(1, 512))
def test_the_least_multiple(vocabulary: int, tp: int, multiple: int) -> None:
    padded = padded_vocabulary(vocabulary, tp, multiple)
    assert padded % (tp * multiple) == 0
    assert 0 <= padded - vocabulary < tp * multiple


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 64))
def test_every_rank_holds_its_share_of_heads(kv_heads: int, group: int, tp: int) -> None:
    attention = Attention(kv_heads * group, kv_heads, 64)
    local = local_heads(attention, tp, pad=True)
    assert tp * local.num_heads == attention.num_heads + local.padded_heads
    assert local.padded_heads >= 0
    assert local.num_heads % local.num_kv_heads == 0
    assert tp * local.num_kv_heads >= kv_heads * local.kv_copies
    assert tp % local.kv_copies == 0
    if attention.num_heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0):
        assert local == local_heads(attention, tp)
        assert local.padded_heads == 0
        assert tp * local.num_kv_heads == kv_heads * local.kv_copies
    else:
        with pytest.raises(LayoutError, match=f"on {tp} tensor-parallel ranks"):
            local_heads(attention, tp)


def test_sizes_are_checked() -> None:
    with pytest.raises(WorkloadError, match="tp is 0"):
        local_heads(Attention(8, 8, 64), 0)
    with pytest.raises(WorkloadError, match="vocabulary is -1"):
        padded_vocabulary(-1, 8)
