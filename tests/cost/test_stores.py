"""Stores into peers' memory, copies in pieces, flags and barriers: published rates, shares of a whole, ends."""

from __future__ import annotations

import pytest

from overlapsim.cost.prices import PriceBook
from overlapsim.cost.stores import mechanism, peer_stores
from overlapsim.errors import UsageError
from overlapsim.hardware.bounds import wire_lower_bound_s
from overlapsim.hardware.loading import load_cluster
from overlapsim.workload.operators import CollectiveOp

H100, B200, A100 = (load_cluster(f"{name}-sxm8") for name in ("h100", "b200", "a100"))
GATHER, SCATTER = (CollectiveOp(kind, 2.0**28, 8) for kind in ("all_gather", "reduce_scatter"))


def test_tma_and_register_stores_reach_the_published_share() -> None:
    sent = 2.0**28 * 7 / 8
    assert (mechanism(H100.device), mechanism(B200.device), mechanism(A100.device)) == ("tma", "tma", "registers")
    assert sent / peer_stores(H100, 8, 2.0**28).seconds == pytest.approx(350.01e9, rel=0.01)
    assert sent / peer_stores(A100, 8, 2.0**28).seconds == pytest.approx(0.76 * 300e9, rel=0.01)


def test_fifteen_sms_store_at_the_full_rate() -> None:
    stores = peer_stores(H100, 8, 2.0**28)
    # Less what storing at home takes, 2 of the 15.
    assert 12.5 < stores.sm_seconds / stores.seconds < 15
    assert peer_stores(A100, 8, 2.0**28).sm_seconds == 0


def test_received_bytes_are_written_once() -> None:
    amounts = {d.resource: d.amount for d in peer_stores(H100, 8, 2.0**28).demands}
    assert amounts["hbm[0]"] == amounts["nvlink_out[0]"] == amounts["nvlink_in[0]"] == 2.0**28 * 7 / 8


@pytest.mark.parametrize(("name", "ranks"), [("rtx4090-pcie8", 4), ("h100-sxm8", 16)])
def test_peers_out_of_reach_are_refused(name, ranks) -> None:
    with pytest.raises(UsageError, match="cannot store into each other's memory"):
        peer_stores(load_cluster(name).with_nodes(2), ranks, 2.0**20)


def test_copies_are_equal_parts_with_a_start_each() -> None:
    book = PriceBook(H100, 8)
    seven, many = (book.copies(GATHER, pieces) for pieces in (7, 56))
    assert 56 * many[0] - 7 * seven[0] == pytest.approx(49 * 3e-6)
    whole = book.collective(CollectiveOp("all_gather", 2.0**28, 8, engine="copy_engine")).duration_s
    assert 7 * seven[0] + book.barrier_s == pytest.approx(whole)
    for seconds, demands in (seven, many):
        share = {d.resource: d.amount for d in demands}["nvlink_in[0]"] / (2.0**28 * 7 / 8)
        assert share == pytest.approx(1 / 7 if seconds == seven[0] else 1 / 56, rel=0.03)


def test_ends_and_what_ifs_move_them() -> None:
    book = PriceBook(H100, 8)
    for price in (lambda b: b.copies(GATHER, 7)[0] * 7, lambda b: b.stores(SCATTER).seconds):
        low, high = (price(book.at("collective", end)) for end in ("low", "high"))
        assert wire_lower_bound_s(H100, 8, "all_gather", 2.0**28) <= low < price(book) < high
        assert price(book.scaled("collective", 2.0)) == pytest.approx(2 * price(book))
    free = book.without_latency()
    assert free.flag_s == free.barrier_s == 0.0 < book.flag_s < book.barrier_s
    assert book.flag_s == pytest.approx(832e-9)
    assert free.copies(GATHER, 7)[0] * 7 == pytest.approx(book.copies(GATHER, 7)[0] * 7 - 21e-6)
    assert free.hbm_pass(1e9)[0] < book.hbm_pass(1e9)[0]
