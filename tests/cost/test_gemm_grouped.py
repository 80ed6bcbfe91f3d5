import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.gemm_fitted import fitted_gemm
from overlapsim.cost.grouped import batched_gemm_cost, grouped_gemm_cost
from overlapsim.errors import StrategyError, WorkloadError
from overlapsim.hardware.loading import load_device
from tests.cost.machines import A100

H100 = load_device("h100-sxm5-80gb")
counts = st.lists(st.integers(0, 3000), min_size=1, max_size=40).filter(any)
quick = settings(deadline=None, max_examples=50)


def test_one_product_is_the_plain_kernel():
    for m, n, k in ((4096, 2048, 1024), (2000, 1536, 4096)):
        fitted = fitted_gemm(H100, "bf16")
        grouped = grouped_gemm_cost([m], n, k, H100, tile=(128, 128))
        assert grouped.duration_s == pytest.approx(fitted.kernel(m, n, k, 128, 128, H100.num_sms))


def test_tiles_of_all_products_share_waves():
    # Three products of 11 x 4 tiles are 132 CTAs: one wave, as one product of 33 x 128 rows would be.
    grouped = grouped_gemm_cost([1408] * 3, 512, 4096, H100, tile=(128, 128))
    assert (grouped.grid.num_tiles, grouped.waves, grouped.padding) == (132, 1, 0.0)
    over = grouped_gemm_cost([1408, 1408, 1409], 512, 4096, H100, tile=(128, 128))
    assert (over.grid.num_tiles, over.waves) == (136, 2)
    assert over.duration_s > 1.3 * grouped.duration_s


def test_padding_and_imbalance_cost():
    even = grouped_gemm_cost([512] * 16, 4096, 4096, H100, tile=(128, 128))
    ragged = grouped_gemm_cost([511, 513] * 8, 4096, 4096, H100, tile=(128, 128))
    assert even.rows == ragged.rows
    assert ragged.padded_rows == 8 * (512 + 640) and ragged.padding == pytest.approx(1 - 8192 / 9216)
    assert ragged.duration_s > even.duration_s
    # All tokens at one expert: as many tiles, but one weight to read.
    single = grouped_gemm_cost([8192] + [0] * 15, 4096, 4096, H100, tile=(128, 128))
    assert (single.active, single.grid.num_tiles) == (1, even.grid.num_tiles)
    assert single.demands[0].amount < even.demands[0].amount


def test_few_tokens_read_all_weights():
    # Decode: 256 experts of 7168 x 2048 with four rows each are bound by 7.5 GB of weights.
    cost = grouped_gemm_cost([4] * 256, 2048, 7168, H100)
    weights_s = 256 * 2048 * 7168 * 2 / (3.35e12 * 0.86)
    assert cost.duration_s == pytest.approx(weights_s, rel=0.2)
    assert cost.duration_s < 0.7 * sum(grouped_gemm_cost([4], 2048, 7168, H100).duration_s for _ in range(256))


@quick
@given(counts, st.integers(1, 512), st.integers(1, 512), st.sampled_from([A100, H100]), st.integers(1, 108))
def test_never_below_hardware(rows, n, k, device, sms):
    n, k = 8 * n, 8 * k
    cost = grouped_gemm_cost(rows, n, k, device, sms=sms)
    share = sms / device.num_sms
    assert cost.duration_s >= 2 * sum(rows) * n * k / (device.peak("bf16") * share)
    least_bytes = 2 * k * (sum(rows) + cost.active * n) + 2 * sum(rows) * n
    assert cost.duration_s >= least_bytes / device.hbm_bandwidth_bytes_per_s
    assert cost.duration_s == pytest.approx(cost.waves * cost.tile_time_s)
    assert cost.grid.num_tiles == sum(math.ceil(count / cost.tile[0]) for count in rows) * math.ceil(n / cost.tile[1])
    assert not cost.in_range and cost.spread.origin == "prior"


@quick
@given(counts, st.integers(0, 39), st.integers(1, 1000))
def test_more_rows_are_never_cheaper_at_one_tile(rows, place, added):
    more = list(rows)
    more[place % len(rows)] += added
    before, after = (grouped_gemm_cost(r, 1024, 1024, H100, tile=(128, 128)).duration_s for r in (rows, more))
    assert after >= before * (1 - 1e-12)


def test_a_batch_is_equal_products():
    assert batched_gemm_cost(8, 512, 1024, 256, A100) == grouped_gemm_cost([512] * 8, 1024, 256, A100)


def test_nonsense_is_refused():
    for rows in ([], [0, 0], [4, -1]):
        with pytest.raises(WorkloadError, match="at least one above 0"):
            grouped_gemm_cost(rows, 64, 64, A100)
    with pytest.raises(StrategyError, match="has 108"):
        grouped_gemm_cost([64], 64, 64, A100, sms=109)
