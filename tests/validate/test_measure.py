from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from overlapsim.validate.cli.main import cli
from overlapsim.validate.cli.options import collectives, shapes, sizes
from overlapsim.validate.idle import BUSY_SHARE, CpuTime, others_share
from overlapsim.validate.launch import _most_telling
from overlapsim.validate.measure import MEDIAN_BOUND, Timing, pooled, summary
from overlapsim.validate.output import RecordFile, conditions, timed
from overlapsim.validate.sweeps import far_apart

from overlapsim.calibration.records import Header, Record, read_records
from overlapsim.errors import CalibrationError, UsageError


def test_summary_is_median_and_percentiles() -> None:
    timing = summary([float(value) for value in range(1, 12)])
    assert (timing.median_s, timing.p10_s, timing.p90_s, timing.repeats) == (6.0, 2.0, 10.0, 11)
    assert timing.noise == pytest.approx(4 / 6)
    assert not timing.valid, "eleven samples that differ by so much leave the median open"
    assert replace(timing, repeats=100).valid, "a hundred do not"


def test_rounds_pool_to_the_median_of_their_figures_and_all_repeats() -> None:
    rounds = [summary([median * (1 + step / 100) for step in range(-5, 6)]) for median in (1.0, 3.0, 1.1)]
    timing = pooled(rounds)
    assert (timing.median_s, timing.repeats) == (pytest.approx(1.1), 33)
    assert timing.p10_s == pytest.approx(rounds[2].p10_s), "a disturbed round moves nothing"
    assert pooled([replace(rounds[0], throttled=True), rounds[1]]) == rounds[1]
    assert not pooled([replace(rounds[0], whole=False)]).whole


# Distance of the percentiles at which the median of 20 normal samples is known to a tenth.
SPREAD = MEDIAN_BOUND * 2.563 / 1.253 * 20**0.5


@pytest.mark.parametrize(
    "change, valid",
    [
        ({}, True),
        ({"p90_s": 1.0 + 1.05 * SPREAD, "p10_s": 1.0}, False),
        ({"p90_s": 1.0 + 0.95 * SPREAD, "p10_s": 1.0}, True),
        ({"others": BUSY_SHARE + 0.01}, False),
        ({"throttled": True}, False),
        ({"whole": False}, False),
    ],
)
def test_what_makes_a_time_invalid(change: dict[str, float], valid: bool) -> None:
    assert replace(Timing(1.0, 0.99, 1.01, 20), **change).valid is valid


def test_our_own_time_is_not_that_of_others() -> None:
    before, after = CpuTime(1000.0, 4000.0), CpuTime(1180.0, 4200.0)
    assert others_share(before, after, own_s=1.8) == 0.0
    assert others_share(before, after, own_s=0.8) == pytest.approx(0.5)
    assert others_share(None, after, own_s=0.0) == 0.0


HEADER = Header("CPU of nowhere", libraries={"torch": "2.13.0"}, date="2026-01-01")
LIKE = Record("collective", "all_reduce", 1.0, size_bytes=1024, dtype="fp32", ranks=2, nodes=1)


def test_records_are_kept_and_replaced_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "records.csv"
    file = RecordFile(path, HEADER)
    file.add(timed(LIKE, Timing(2e-3, 1.9e-3, 2.1e-3, 20)))
    noisy = timed(replace(LIKE, size_bytes=2048), Timing(3e-3, 1e-3, 9e-3, 20))
    file.add(noisy)
    again = RecordFile(path, replace(HEADER, date="2026-02-02"))
    assert again.find(LIKE) is not None
    assert again.find(noisy) is None, "what is not valid is measured again"
    again.add(timed(noisy, Timing(3e-3, 2.9e-3, 3.1e-3, 20)))
    records = read_records(path).records
    assert [record.valid for record in records] == [True, True]
    assert len({conditions(record) for record in records}) == 2


def test_records_of_another_machine_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "records.csv"
    RecordFile(path, HEADER).add(timed(LIKE, Timing(2e-3, 1.9e-3, 2.1e-3, 20)))
    with pytest.raises(UsageError, match="another machine"):
        RecordFile(path, replace(HEADER, device="CPU of elsewhere"))
    path.write_text("size,time\n")
    with pytest.raises(CalibrationError):
        RecordFile(path, HEADER)


def test_other_ranks_do_not_write(tmp_path: Path) -> None:
    path = tmp_path / "records.csv"
    file = RecordFile(path, HEADER, writes=False)
    file.add(timed(LIKE, Timing(2e-3, 1.9e-3, 2.1e-3, 20)))
    assert file.find(LIKE) is not None and not path.exists()


def test_a_sweep_that_ends_early_has_seen_the_whole_range() -> None:
    given = [(m, n, k) for m in (64, 256, 1024, 4096) for n in (64, 1024) for k in (64, 1024)]
    ordered = far_apart(given)
    assert sorted(ordered) == sorted(given)
    first = ordered[:6]
    assert {shape[0] for shape in first} >= {64, 4096} and {shape[1] for shape in first} == {64, 1024}


def test_options() -> None:
    assert shapes("2x3x4") == ((2, 3, 4),)
    assert sizes("1KiB:5KiB") == (1024, 2048, 4096, 5120)
    assert collectives("all_reduce,all_to_all") == ("all_reduce", "all_to_all")
    for parse, text in ((shapes, "2x3"), (sizes, "4KiB:1KiB"), (collectives, "all_reduce,gather_all")):
        with pytest.raises(UsageError):
            parse(text)


def test_without_ranks_a_command_says_how_to_start() -> None:
    result = CliRunner().invoke(cli, ["overlap", "--shape", "64x64x64"])
    assert isinstance(result.exception, UsageError)
    assert "torchrun" in str(result.exception) and "--ranks" in str(result.exception)


def test_of_several_errors_the_cause_is_told() -> None:
    cause = "group 1 reached 4 of 5 tiles: its collective would wait for ever"
    others = ["rank 1 failed: ... (rank 0 was in wave groups)", "rank 1 is late (rank 2 waited at end)"]
    assert _most_telling([others[0], cause, others[1]]) == cause
    assert _most_telling(others) == others[0]
    assert _most_telling([]) is None
