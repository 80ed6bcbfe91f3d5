"""Copy engines and NVLS: published rates, the library's threshold, demands, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapsim.cost.prices import PriceBook
from overlapsim.cost.transport import TransportModel, transport_refusal
from overlapsim.engine import compiled
from overlapsim.errors import UsageError, WorkloadError
from overlapsim.hardware.bounds import wire_lower_bound_s
from overlapsim.hardware.loading import load_cluster
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.strategy.tasks import Site
from overlapsim.units import ps_from_s
from overlapsim.workload.operators import CollectiveOp

H100, B200, A800 = (load_cluster(f"{name}-sxm8") for name in ("h100", "b200", "a800"))
MIB = 2.0**20


def seconds(cluster, kind, size, ranks, engine="copy_engine"):
    return float(PriceBook(cluster, ranks).collective_seconds(kind, size, ranks, engine))


@pytest.mark.parametrize(("cluster", "published"), [(H100, 368.82e9), (B200, 726.13e9)], ids=["h100", "b200"])
def test_one_copy_of_1_gb_reaches_the_published_rate(cluster, published) -> None:
    assert 1e9 / seconds(cluster, "send_recv", 1e9, 2) == pytest.approx(published, rel=0.02)


def test_pieces_below_256_mb_fall_behind() -> None:
    """A share of 80 % of the link needs pieces of about 256 MB; the piece's start is the lower of what that allows."""
    rates = [size / seconds(H100, "send_recv", size, 2) / 450e9 for size in (1 * MIB, 16 * MIB, 256e6)]
    assert rates[0] < 0.3 < rates[1] < rates[2] and rates[2] == pytest.approx(0.80, abs=0.015)


def test_the_library_leaves_kernels_at_8_mib() -> None:
    """NCCL takes copy engines from 8 MiB on: there both take the same, above copies win on Hopper."""
    kernel = PriceBook(H100, 8)
    at = [seconds(H100, "all_gather", size, 8) / float(kernel.collective_seconds("all_gather", size, 8)) for size in
          (2 * MIB, 8 * MIB, 64 * MIB, 512 * MIB)]  # fmt: skip
    assert at[0] > 1.05 and at[1] == pytest.approx(1, abs=0.05) and max(at[2:]) < 1


@pytest.mark.parametrize("kind", ["all_gather", "all_to_all", "send_recv"])
def test_copy_engines_hold_no_sm_and_load_links_and_hbm(kind) -> None:
    cost = PriceBook(H100, 8).collective(CollectiveOp(kind, 64 * MIB, 8, engine="copy_engine"))
    amounts = {demand.resource: demand.amount for demand in cost.demands}
    sent = 64 * MIB * (1 if kind == "send_recv" else 7 / 8)
    assert cost.sm == 0
    assert amounts["nvlink_out[0]"] == pytest.approx(min(sent, cost.duration_s * 0.8 * 450e9))
    assert amounts["hbm[0]"] == pytest.approx(2 * sent)


def test_nvls_has_its_own_rate_and_channels() -> None:
    book = PriceBook(H100, 8)
    nvls = book.collective(CollectiveOp("all_reduce", 512 * MIB, 8, engine="nvls"))
    kernel = book.collective(CollectiveOp("all_reduce", 512 * MIB, 8))
    assert (nvls.sm, kernel.sm) == (16, 24)
    # The library takes NVLS at this size, so its measured curve is the same transport.
    assert nvls.duration_s == pytest.approx(kernel.duration_s, rel=0.1)
    assert PriceBook(B200, 8).comm_sms("all_reduce", "nvls") == 24
    assert replace(book, collective_sms=6).comm_sms("all_reduce", "nvls") == 6


@pytest.mark.parametrize(
    ("cluster", "kind", "engine", "why"),
    [
        (A800, "all_reduce", "nvls", "no switch that reduces"),
        (load_cluster("l40s-pcie8"), "all_gather", "nvls", "no switch that reduces"),
        (H100, "all_to_all", "nvls", "NVLS does not run all_to_all, only all_gather"),
        (H100.with_nodes(2), "all_gather", "copy_engine", "stay inside one node"),
        (H100, "broadcast", "copy_engine", "do not run broadcast"),
        (load_cluster("rtx4090-pcie8"), "all_gather", "copy_engine", "no peer-to-peer access"),
    ],
)
def test_refused_elsewhere_with_the_reason(cluster, kind, engine, why) -> None:
    ranks = cluster.num_devices
    op = CollectiveOp(kind, MIB, ranks, engine=engine)
    reason = PriceBook(cluster, ranks).refusal(op)
    assert reason is not None and why in reason
    with pytest.raises(UsageError, match=why):
        PriceBook(cluster, ranks).flow(op)


def test_what_runs_is_not_refused() -> None:
    assert transport_refusal(H100, "all_reduce", 8, "nvls") is None
    assert transport_refusal(load_cluster("l40s-pcie8"), "send_recv", 2, "copy_engine") is None
    assert transport_refusal(A800, "all_to_all", 8, "kernel") is None


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_copy_engines_cannot_reduce(kind) -> None:
    with pytest.raises(WorkloadError, match="cannot reduce"):
        CollectiveOp(kind, MIB, 8, engine="copy_engine")
    with pytest.raises(WorkloadError, match="'dma' is unknown"):
        CollectiveOp("all_gather", MIB, 8, engine="dma")


@given(st.floats(1, 2**32), st.floats(1.01, 100), st.sampled_from(["nvls", "copy_engine"]), st.sampled_from([2, 4, 8]))
def test_time_grows_with_size_and_stays_above_the_wires(size, factor, engine, ranks) -> None:
    model = TransportModel(H100, "all_gather", ranks, engine)
    small, large = (float(model.seconds(s)) for s in (size, size * factor))
    assert small < large
    low, high = (float(model.seconds_at(size, end)) for end in ("low", "high"))
    assert low <= small <= high
    assert low >= wire_lower_bound_s(H100, ranks, "all_gather", size) * (1 - 1e-9)
    assert float(model.bandwidth_seconds(size)) <= small


def test_one_rank_moves_nothing() -> None:
    assert float(TransportModel(H100, "all_gather", 1, "copy_engine").seconds(np.array(MIB))) == 0.0


def test_a_copy_runs_on_the_copy_engine_beside_a_kernel_with_all_sms() -> None:
    builder = ProgramBuilder()
    prices = PriceBook(H100, 2)
    gpu = Site(builder, prices).gpu()
    gpu.builder.add_blocks(stream=gpu.compute_stream, pool=gpu.pool, units=132, unit_ps=ps_from_s(1e-3), sm=132)
    op = CollectiveOp("send_recv", 64 * MIB, 2, engine="copy_engine")
    first, second = gpu.add_collective(op), gpu.add_collective(op, stream=gpu.stream("other"))
    timeline = compiled.run(builder.freeze(), contention=False)
    duration_ps = ps_from_s(prices.flow(op)[0])
    assert (timeline.t_start[first], timeline.t_end[first]) == (0, duration_ps)
    # One engine: the other copy waits for it although its stream is free.
    assert timeline.t_start[second] == duration_ps
    assert timeline.duration_s == pytest.approx(1e-3)
