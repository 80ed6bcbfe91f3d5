"""Fits of collective times: a line through a public report, known constants given back, what is refused."""

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.calibration.fit_collective import (
    CollectiveRow,
    fit_collective,
    fit_document,
    fit_latency_bandwidth,
    residuals,
    split_spikes,
    with_spread,
)
from overlapsim.calibration.fit_fabric import fit_fabric
from overlapsim.cost.fabric import FabricModel, fabric_prior
from overlapsim.cost.structural import PAIR_PARAMETERS, RING_PARAMETERS, OneNodeModel
from overlapsim.errors import CalibrationError
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.profile import Source

SOURCE = Source("measured", "a test")
SIZES = 2.0 ** np.arange(9, 30)
RINGS = ("all_reduce", "all_gather", "reduce_scatter")

# Triton-distributed issue 57: all-reduce on 8 H100 as reported, us; the 2 MiB row is a stall.
REPORTED_BYTES = (128, 65536, 2**20, 2**21, 2**22, 2**23, 2**24)
REPORTED_US = (19.2, 23.0, 32.4, 290.7, 59.4, 90.5, 135.7)


def test_e06_latency_and_bandwidth_of_a_report_without_its_outlier():
    line = fit_latency_bandwidth(REPORTED_BYTES, [us * 1e-6 for us in REPORTED_US])
    assert [REPORTED_BYTES[i] for i in line.outliers] == [2**21]
    assert line.latency_s * 1e6 == pytest.approx(22, abs=2.5)
    assert line.bytes_per_s / 1e9 == pytest.approx(135, rel=0.15)
    assert line.residual < 0.12
    # What the stall hid: 2 MiB takes about 38 us.
    assert 33 < float(line.seconds(2**21)) * 1e6 < 42


def test_e06_as_rows_the_spike_is_named_and_left_out():
    rows = [
        CollectiveRow("all_reduce", 8, 1, float(size), us * 1e-6)
        for size, us in zip(REPORTED_BYTES, REPORTED_US, strict=True)
    ]
    kept, (outlier,) = split_spikes(rows)
    assert outlier.row.size_bytes == 2**21 and outlier.factor == pytest.approx(290.7 / 59.4)
    assert "larger size" in outlier.reason and len(kept) == 6


@settings(deadline=None, max_examples=30)
@given(st.floats(2e-6, 1e-4), st.floats(5e9, 5e11), st.integers(0, 19), st.floats(3.0, 20.0))
def test_one_stall_never_moves_the_line(latency, rate, where, factor):
    times = latency + SIZES / rate
    times[where] *= factor
    line = fit_latency_bandwidth(SIZES.tolist(), times.tolist())
    assert where in line.outliers
    assert line.latency_s == pytest.approx(latency, rel=0.02)
    assert line.bytes_per_s == pytest.approx(rate, rel=0.02)


def test_a_line_is_refused_what_is_none():
    with pytest.raises(CalibrationError, match="3 points or more"):
        fit_latency_bandwidth([1.0, 2.0], [1.0, 2.0])
    with pytest.raises(CalibrationError, match="not finite and > 0"):
        fit_latency_bandwidth([1.0, 2.0, 3.0], [1.0, 0.0, 2.0])


def known_parameters(link):
    values = {}
    for name, (unit, start, _, _) in {**RING_PARAMETERS, **PAIR_PARAMETERS}.items():
        values[name] = start * link if unit == "B/s" else start
    changed = {
        "small_base": 5e-6,
        "ll_base": 7e-6,
        "simple_hop": 4e-6,
        "simple_rate": 0.8 * link,
        "ll_rate": 0.4 * link,
    }
    return {**values, **changed, "link_rate": link}


def made_rows(model, kinds, ranks=(2, 4, 8)):
    return [
        CollectiveRow(kind, n, 1, float(size), float(time))
        for kind in kinds
        for n in ranks
        for size, time in zip(SIZES, model.seconds(kind, n, SIZES), strict=True)
    ]


def fitted(rows, **changes):
    options = {"architecture": "hopper", "link_bytes_per_s": 450e9, "switch_reduction": True, "source": SOURCE}
    return fit_collective(rows, **{**options, **changes})


def test_times_of_a_known_machine_are_given_back_at_other_ranks():
    truth = OneNodeModel(known_parameters(450e9), "hopper", 450e9, True)
    fit = fitted(made_rows(truth, (*RINGS, "all_to_all")))
    assert (fit.family, fit.key, fit.num_points) == ("collective", "nccl", 4 * 3 * 21)
    unseen = made_rows(truth, (*RINGS, "all_to_all"), ranks=(3, 6))
    off = np.abs(residuals(fit, unseen, "hopper", switch_reduction=True))
    assert np.median(off) < 0.01 and off.max() < 0.08
    for name, (unit, _, least, most) in {**RING_PARAMETERS, **PAIR_PARAMETERS}.items():
        scale = 450e9 if unit == "B/s" else 1.0
        assert least * scale * 0.999 <= fit.parameters[name] <= most * scale * 1.001


def test_the_same_rows_give_the_same_fit_in_any_order():
    truth = OneNodeModel(known_parameters(450e9), "hopper", 450e9, True)
    rows = made_rows(truth, RINGS)
    assert fitted(rows).parameters == fitted(list(reversed(rows))).parameters


def test_groups_without_rows_are_left_out():
    truth = OneNodeModel(known_parameters(450e9), "hopper", 450e9, True)
    rings, pairs = fitted(made_rows(truth, RINGS)), fitted(made_rows(truth, ("all_to_all",)))
    assert "pair_rate" not in rings.parameters and "simple_rate" not in pairs.parameters
    assert np.isnan(residuals(rings, made_rows(truth, ("all_to_all",), (2,)), "hopper", switch_reduction=True)).all()


def test_spikes_are_said_in_the_notes():
    truth = OneNodeModel(known_parameters(450e9), "hopper", 450e9, True)
    rows = made_rows(truth, RINGS)
    rows[5] = rows[5]._replace(time_s=1.0)
    fit = fitted(rows)
    assert "1 spikes left out" in fit.notes and fit.num_points == len(rows) - 1


def test_what_cannot_be_fitted_is_refused():
    truth = OneNodeModel(known_parameters(450e9), "hopper", 450e9, True)
    rows = made_rows(truth, RINGS)
    with pytest.raises(CalibrationError, match="no NVLink"):
        fitted(rows, link_bytes_per_s=0.0)
    with pytest.raises(CalibrationError, match="rows of one node"):
        fitted([*rows, rows[0]._replace(nodes=2, ranks=16)])
    with pytest.raises(CalibrationError, match="expected 8 or more"):
        fitted(rows[:4])
    with pytest.raises(CalibrationError, match="no row of"):
        fitted([])


def test_a_fit_file_is_read_back(tmp_path):
    truth = OneNodeModel(known_parameters(450e9), "hopper", 450e9, True)
    fit = with_spread(fitted(made_rows(truth, (*RINGS, "all_to_all"))), {"large": (0.95, 1.07)})
    document = fit_document([fit], "mine")
    (tmp_path / "mine_fit.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(
        "kind: cluster\nextends: h100-sxm8\ncurves: null\nfits: [mine_fit.yaml]\n", encoding="utf-8"
    )
    read = load_cluster(str(tmp_path / "mine.yaml")).fits["collective.nccl"]
    assert set(read.parameters) == set(fit.parameters)
    for name, value in fit.parameters.items():
        assert read.parameters[name] == pytest.approx(value, rel=1e-3)
    assert read.spread["large"] == (0.95, 1.07)


def test_fabric_constants_are_given_back():
    truth = {**fabric_prior(load_cluster("h100-sxm8")), "tree_net": 25e-6, "pair_nic_efficiency": 0.8}
    rows = [
        CollectiveRow(kind, 16, 2, float(size), float(time))
        for kind in ("all_reduce", "all_gather", "all_to_all")
        for size, time in zip(SIZES, FabricModel(truth, 5e-6, 1e-6, 16, 2, 400e9).seconds(kind, SIZES), strict=True)
    ]
    fit = fit_fabric(rows, base_s=5e-6, hop_s=1e-6, nic_bytes_per_s=400e9, source=SOURCE)
    assert (fit.key, fit.num_points) == ("fabric", 63)
    assert fit.parameters["tree_net"] == pytest.approx(25e-6, rel=0.05)
    assert fit.parameters["pair_nic_efficiency"] == pytest.approx(0.8, rel=0.05)
    model = FabricModel(fit.parameters, 5e-6, 1e-6, 16, 2, 400e9)
    for kind in ("all_reduce", "all_gather", "all_to_all"):
        mine = np.array([row.time_s for row in rows if row.kind == kind])
        assert np.abs(model.seconds(kind, SIZES) / mine - 1).max() < 0.05


def test_fabric_rows_must_span_nodes():
    row = CollectiveRow("all_reduce", 8, 1, 1e6, 1e-4)
    with pytest.raises(CalibrationError, match="two nodes or more"):
        fit_fabric([row] * 4, base_s=5e-6, hop_s=1e-6, nic_bytes_per_s=1e9, source=SOURCE)
    with pytest.raises(CalibrationError, match="no NIC"):
        fit_fabric([row._replace(nodes=2)], base_s=5e-6, hop_s=1e-6, nic_bytes_per_s=0, source=SOURCE)
    with pytest.raises(CalibrationError, match="expected 4 or more"):
        fit_fabric([row._replace(nodes=2)], base_s=5e-6, hop_s=1e-6, nic_bytes_per_s=1e9, source=SOURCE)
