"""nccl-tests text: every column variant gives the same records; what cannot be trusted is refused or reported."""

from __future__ import annotations

import re

import pytest

from overlapsim.calibration.readers.nccl_tests_text import parse_nccl_tests_text
from overlapsim.calibration.readers.reading import Hints, Reading
from overlapsim.errors import CalibrationError
from tests.calibration.logs import PROGRAMS, SECRETS, TIMES_US, banner, footer, log, table

NODE = Hints(ranks_per_node=8)


def read(text: str, hints: Hints = NODE) -> Reading:
    return parse_nccl_tests_text(text, "run.log", hints)


def codes(reading: Reading) -> set[str]:
    return {finding.code for finding in reading.findings}


def check_times(reading: Reading) -> None:
    out = [record for record in reading.records if not record.in_place]
    assert [record.size_bytes for record in out] == [size for size, _ in TIMES_US]
    for record, (_, time_us) in zip(out, TIMES_US, strict=True):
        assert record.median_s == pytest.approx(time_us * 1e-6, rel=2e-3)
    inside = [record for record in reading.records if record.in_place]
    assert [record.median_s for record in inside] == pytest.approx([record.median_s * 0.98 for record in out], rel=2e-3)


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"new": False, "root": False, "error": True, "wrong": "7e-07"},
        {"new": False},
        {"per_iter": True},
        {"stamp": True},
        {"per_iter": True, "stamp": True},
        {"wrong": "N/A"},
    ],
    ids=["2.19", "old, no root, error", "unnamed", "-I", "-S", "-I -S", "-c 0"],
)
def test_column_variants_give_the_same_times(variant: dict[str, object]) -> None:
    reading = read(log(**variant))  # type: ignore[arg-type]
    check_times(reading)
    assert {(r.op, r.ranks, r.nodes, r.dtype, r.valid) for r in reading.records} == {("all_reduce", 8, 1, "fp32", True)}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda line: f"0: {line}",
        lambda line: f"[1,0]<stdout>:{line}",
        lambda line: (
            f"[1,0]<stdout>: {line[:50]}[1,0]<stdout>:{line[50:]}"
            if not line.startswith("#")
            else f"[1,0]<stdout>:{line}"
        ),
        lambda line: "      " + line,
        lambda line: "\x1b[32m" + line + "\x1b[0m",
        lambda line: line.removeprefix("#"),
        lambda line: line + "   \r",
    ],
    ids=["srun -l", "mpirun", "mpirun, row in two pieces", "markdown", "colours", "hash lost", "crlf"],
)
def test_what_launchers_add(wrap) -> None:  # type: ignore[no-untyped-def]
    check_times(read("\n".join(wrap(line) for line in log().splitlines()) + "\n"))


def test_warnings_between_rows_are_passed_over() -> None:
    lines = log().splitlines()
    noisy = []
    for number, line in enumerate(lines):
        noisy.append(line)
        if number % 3 == 0:
            noisy.append(f"{SECRETS[0]}:71:93 [2] NCCL WARN NET/IB : Got async event : port active 12 5")
    check_times(read("\n".join(noisy)))


def test_a_row_broken_by_a_warning_is_put_together() -> None:
    lines = log().splitlines()
    place = next(i for i, line in enumerate(lines) if re.match(r"\s+4096 ", line))
    lines[place : place + 1] = [lines[place][:54], f"{SECRETS[0]}:1:2 [0] NCCL WARN hiccup", lines[place][54:]]
    reading = read("\n".join(lines) + "\n")
    check_times(reading)
    assert "rows_rejoined" in codes(reading)


def test_two_tests_in_one_log_give_both() -> None:
    reading = read(log("all_reduce") + "srun: job done\n" + log("all_gather", new=True))
    assert {record.op for record in reading.records} == {"all_reduce", "all_gather"}
    assert len(reading.records) == 4 * len(TIMES_US)


def test_commands_name_the_tests_of_old_versions() -> None:
    text = "".join(
        f"$ mpirun -np 8 ./build/{PROGRAMS[name]} -b 1K -e 128M -f 2\n{log(name, new=False)}"
        for name in ("reduce_scatter", "all_to_all")
    )
    assert {record.op for record in read(text).records} == {"reduce_scatter", "all_to_all"}


@pytest.mark.parametrize("collective", list(PROGRAMS))
def test_every_collective(collective: str) -> None:
    reading = read(log(collective))
    assert {record.op for record in reading.records} == {collective}
    check_times(reading)


def test_nodes_come_from_ranks_per_node_and_must_agree_with_the_hosts() -> None:
    text = log(ranks=16)
    assert {record.nodes for record in read(text).records} == {2}
    with pytest.raises(CalibrationError, match="expected --ranks-per-node 8"):
        read(text, Hints(ranks_per_node=4))
    with pytest.raises(CalibrationError, match="does not guess; give --ranks-per-node"):
        read(text, Hints())


def test_one_host_name_a_rank_is_reported() -> None:
    assert "host_per_rank" in codes(read(log(ranks=2, per_host=1)))


def test_nothing_private_is_kept() -> None:
    text = f"user=mallory cwd={SECRETS[3]} addr {SECRETS[2]}\n" + log(ranks=16)
    kept = repr(read(text))
    for secret in (*SECRETS, "mallory", "4242"):
        assert secret not in kept


def test_nothing_private_is_in_messages() -> None:
    lines = log().splitlines()
    rows = [i for i, line in enumerate(lines) if line.startswith("   ")]
    for place in rows[::2]:
        lines[place] = lines[place][:60] + f" {SECRETS[0]} " + lines[place][60:]
    with pytest.raises(CalibrationError) as caught:
        read("\n".join(lines))
    assert SECRETS[0] not in str(caught.value)


@pytest.mark.parametrize("cut", [3, 20, 60, 75])
def test_a_cut_off_last_row_is_left_out_or_kept_half(cut: int) -> None:
    whole = "\n".join(banner("all_reduce", 8, 8, new=True) + table("all_reduce", 8))
    reading = read(whole[:-cut])
    assert "cut_off" in codes(reading)
    out = [record for record in reading.records if not record.in_place]
    for record, (size, time_us) in zip(out, TIMES_US, strict=False):
        assert record.size_bytes == size
        assert record.median_s == pytest.approx(time_us * 1e-6, rel=2e-3)
    assert len(out) >= len(TIMES_US) - 1


@pytest.mark.parametrize("keep", range(40, 120, 7))
def test_any_cut_inside_the_last_row_never_gives_a_wrong_number(keep: int) -> None:
    body = "\n".join(banner("all_reduce", 8, 8, new=True) + table("all_reduce", 8, TIMES_US[:-1])) + "\n"
    last = table("all_reduce", 8, TIMES_US[-1:])[-1]
    expected = TIMES_US[-1][1] * 1e-6
    for record in read(body + last[:keep]).records:
        if record.size_bytes == TIMES_US[-1][0]:
            assert record.median_s == pytest.approx(expected * (0.98 if record.in_place else 1), rel=2e-3)


def test_outputs_mixed_line_by_line_are_refused() -> None:
    one = banner("all_reduce", 8, 8, new=True) + table("all_reduce", 8)
    other = banner("all_reduce", 8, 8, new=True) + table(
        "all_reduce", 8, [(size, 1.3 * time) for size, time in TIMES_US]
    )
    mixed = [line for pair in zip(one, other, strict=True) for line in pair]
    with pytest.raises(CalibrationError, match="two runs is mixed"):
        read("\n".join(mixed))


def test_mixed_outputs_with_launcher_labels_are_told_apart() -> None:
    one, other = log("all_reduce").splitlines(), log("all_gather").splitlines()
    mixed = [line for a, b in zip(one, other, strict=True) for line in (f"[1,0]<stdout>:{a}", f"[2,0]<stdout>:{b}")]
    reading = read("\n".join(mixed))
    assert {record.op for record in reading.records} == {"all_reduce", "all_gather"}


def test_two_rows_in_one_line_are_refused() -> None:
    lines = banner("all_reduce", 8, 8, new=True) + table("all_reduce", 8)
    rows = lines[-len(TIMES_US) :]
    glued = [a + b for a, b in zip(rows[::2], rows[1::2], strict=True)]
    with pytest.raises(CalibrationError, match="rows contradict themselves"):
        read("\n".join(lines[: -len(TIMES_US)] + glued))


def test_sizes_that_jump_are_refused() -> None:
    shuffled = [*TIMES_US[::2], *TIMES_US[1::2]]
    with pytest.raises(CalibrationError, match="sizes fall"):
        read(log(times=shuffled))


def test_cycles_begin_again() -> None:
    assert len(read(log(times=[*TIMES_US, *TIMES_US])).records) == 4 * len(TIMES_US)


def test_a_changed_time_column_is_found_by_the_bandwidth_beside_it() -> None:
    text = re.sub(r"(-1\s+)(\d+\.\d+)", lambda m: f"{m[1]}{float(m[2]) / 1000:.5f}", log())
    with pytest.raises(CalibrationError, match="algbw says"):
        read(text)


def test_one_broken_row_is_reported_and_left_out() -> None:
    lines = log().splitlines()
    place = next(i for i, line in enumerate(lines) if re.match(r"\s+65536 ", line))
    lines[place] = lines[place].replace(f"{TIMES_US[6][1]:.2f}", "9.99")
    reading = read("\n".join(lines) + "\n")
    assert "broken_rows" in codes(reading)
    assert 65536 not in {record.size_bytes for record in reading.records}


def test_wrong_results_are_not_valid() -> None:
    reading = read(log(wrong="5"))
    assert not any(record.valid for record in reading.records)


def test_ranks_that_contradict_the_bandwidths_are_refused() -> None:
    text = re.sub(r"#  Rank  7.*\n", "", log())
    reading = read(text, Hints(ranks_per_node=8))
    assert {record.ranks for record in reading.records} == {8}
    assert "ranks_derived" in codes(reading)
    with pytest.raises(CalibrationError, match="bus and algorithm bandwidth"):
        read(re.sub(r"Collective test starting: all_reduce", "Collective test starting: all_gather", log()))


def test_a_log_without_its_beginning() -> None:
    rows = "\n".join(table("all_reduce", 8)[2:] + footer("all_reduce")) + "\n"
    reading = read(rows)
    assert {(record.op, record.ranks) for record in reading.records} == {("all_reduce", 8)}
    assert codes(reading) >= {"ranks_derived", "collective_derived"}
    with pytest.raises(CalibrationError, match="give --collective"):
        read("\n".join(table("all_gather", 8, wrong="N/A")[2:] + footer("all_gather", new=False)))
    for name in ("all_gather", "all_to_all"):
        unnamed = read("\n".join(table(name, 8)[2:] + footer(name, new=False)))
        assert {record.op for record in unnamed.records} == {name}
        assert "collective_derived" in codes(unnamed)


def test_built_without_mpi() -> None:
    rows = [f"{size:12d} {size // 4:12d} float sum -1 {time:.2f} {size / time / 1e3:.2f} 0.00 0 {time:.2f} "
            f"{size / time / 1e3:.2f} 0.00 0" for size, time in TIMES_US]  # fmt: skip
    with pytest.raises(CalibrationError, match="MPI=1"):
        read("\n".join(banner("all_reduce", 1, 1, new=True) + rows))


def test_no_rows() -> None:
    with pytest.raises(CalibrationError, match="no row of an nccl-tests table"):
        read("\n".join(banner("all_reduce", 8, 8, new=True)))


def test_settings_are_reported() -> None:
    text = log().replace("warmup iters: 5", "warmup iters: 0").replace("agg iters: 1", "agg iters: 4")
    text = text.replace(
        "# Using devices", "# Blocking Enabled: wait for completion and barrier after each collective\n# Using devices"
    )
    assert codes(read(text)) >= {"no_warmup", "aggregated", "blocking"}


def test_forced_algorithm_is_kept() -> None:
    reading = read("mpirun -x NCCL_ALGO=Ring -x NCCL_PROTO=LL128 all_reduce_perf\n" + log())
    assert {(record.algo, record.proto) for record in reading.records} == {("Ring", "LL128")}


def test_rows_of_size_zero_are_passed_over() -> None:
    half = "     0.20    0.00    0.00      0"
    zero = "           0             0     float    none      -1" + half + half
    lines = log("all_gather").splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("   "))
    lines[place:place] = [zero, zero]
    assert len(read("\n".join(lines) + "\n").records) == 2 * len(TIMES_US)


def test_versions_and_device() -> None:
    header = read(log()).header
    assert header.device == "Example GPU"
    assert header.libraries == {"nccl": "2.30.7", "nccl-tests": "2.19.6"}
