"""What only the compiled engine can get wrong: its caches, its buffers, its bits, its threads."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from overlapsim.engine.compiled import run
from overlapsim.engine.kernel_pack import packed
from overlapsim.engine.timeline import Timeline
from overlapsim.jit import compiled
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import BLOCKS, HOST, Program
from overlapsim.testing.programs import random_program

SEEDS = range(3_000_000, 3_000_060)


def values(timeline: Timeline) -> list[list[float]]:
    """All arrays of a timeline, recorded ones included."""
    parts = [timeline, timeline.cohorts, timeline.speeds]
    arrays = [getattr(p, f.name) for p in parts if p is not None for f in fields(p)]
    return [a.tolist() for a in arrays if isinstance(a, np.ndarray)]


def two_kernels(unit_ps: int = 100) -> Program:
    """A kernel and a transfer that share a resource for a while."""
    b = ProgramBuilder()
    hbm = b.add_resource(4e12)
    gpu = b.add_pool(4, derate=0.9)
    b.add_blocks(stream=b.add_stream(), pool=gpu, units=10, unit_ps=unit_ps, sm=3, demands={hbm: 120.0})
    b.add_flow(stream=b.add_stream(), pool=gpu, units=2, unit_ps=90, sm=1, demands={hbm: 90.0})
    return b.freeze()


def test_runs_repeat_and_change_nothing() -> None:
    for seed in SEEDS:
        program = random_program(seed)
        digest = program.digest
        first = values(run(program, record=True))
        before = [np.copy(table) for table in packed(program)]
        for contention in (False, True):
            run(program, contention=contention)
        assert values(run(program, record=True)) == first
        assert all(np.array_equal(a, b) for a, b in zip(before, packed(program), strict=True))
        again = Program(**{f.name: getattr(program, f.name) for f in fields(program)})
        assert again.digest == digest


def test_results_are_read_only() -> None:
    timeline = run(two_kernels(), record=True)
    for part in (timeline, timeline.cohorts, timeline.speeds):
        for spec in fields(part):
            array = getattr(part, spec.name)
            if isinstance(array, np.ndarray):
                assert not array.flags.writeable, spec.name
                assert array.dtype == (np.float64 if spec.name == "speed" else np.int64)


def test_a_changed_copy_is_not_mistaken_for_its_original() -> None:
    program = two_kernels()
    slow = run(program).end_ps
    assert run(program, contention=False).end_ps == 400
    assert run(replace(program, unit_ps=program.unit_ps * 2), contention=False).end_ps == 800
    assert run(program).end_ps == slow > 400


def test_a_program_that_ran_can_be_sent_to_another_process() -> None:
    program = two_kernels()
    expected = values(run(program))
    assert values(run(pickle.loads(pickle.dumps(program)))) == expected


def test_contention_off_is_the_program_without_contention() -> None:
    changed = 0
    for seed in SEEDS:
        program = random_program(seed)
        off = run(program, contention=False, record=True)
        assert off.speeds is not None
        assert set(off.speeds.speed.tolist()) <= {1.0}
        assert values(off) == values(run(program.without_contention(), record=True))
        changed += values(off) != values(run(program, record=True))
    assert changed > 10  # or the flag was not tried


@pytest.mark.parametrize("contention", [True, False])
@pytest.mark.parametrize("record", [True, False])
def test_empty_program(contention: bool, record: bool) -> None:
    timeline = run(ProgramBuilder().freeze(), contention=contention, record=record)
    assert timeline.complete
    assert timeline.end_ps == 0
    assert timeline.t_end.shape == (0,)
    assert timeline.cohorts is None or len(timeline.cohorts.task) == 0


def test_machine_without_tasks_and_host_without_machine() -> None:
    b = ProgramBuilder()
    b.add_pool(4)
    b.add_resource(1.0)
    b.add_stream()
    assert run(b.freeze()).complete
    b = ProgramBuilder()
    first = b.add_host(unit_ps=7)
    b.add_edge(first, b.add_host(unit_ps=0, host=1), lag_ps=3)
    assert run(b.freeze()).t_end.tolist() == [7, 10]


def test_recording_agrees_with_the_instants() -> None:
    for seed in SEEDS:
        program = random_program(seed)
        timeline = run(program, record=True)
        assert values(timeline)[:7] == values(run(program))
        cohorts = timeline.cohorts
        assert cohorts is not None
        order = np.lexsort((cohorts.end_ps, cohorts.task, cohorts.start_ps))
        assert np.array_equal(order, np.arange(len(order)))
        for task in range(program.num_tasks):
            mine = cohorts.task == task
            ended = int(cohorts.units[mine].sum())
            if program.persistent[task]:
                assert ended >= timeline.progress[task]
            else:
                assert ended == timeline.progress[task]
            if ended:
                assert cohorts.start_ps[mine].min() == timeline.t_start[task]
            if timeline.t_end[task] >= 0:
                assert cohorts.end_ps[mine].max() == timeline.t_end[task]
                assert ended == program.units[task]


def test_speeds_do_the_work_of_every_unit() -> None:
    """The integral of a runner's speed over any of its units is the unit's time, but for the last picosecond."""
    checked = 0
    for seed in SEEDS:
        program = random_program(seed)
        timeline = run(program, record=True)
        cohorts, speeds = timeline.cohorts, timeline.speeds
        assert cohorts is not None
        assert speeds is not None
        assert np.all(np.diff(speeds.time_ps) >= 0)
        for task, start, end in zip(cohorts.task, cohorts.start_ps, cohorts.end_ps, strict=True):
            if program.kind[task] == HOST:
                continue
            group = program.task_runner_group[task]
            runner = task if program.kind[task] == BLOCKS else program.group_members.row(group)[0]
            unit_ps = program.unit_ps[task if program.kind[task] == BLOCKS else program.group_members.row(group)].max()
            times, speed = speeds.time_ps[speeds.task == runner], speeds.speed[speeds.task == runner]
            before = np.searchsorted(times, start, side="right") - 1
            assert before >= 0
            inside = (times > start) & (times < end)
            corners = np.concatenate([[start], times[inside], [end]])
            rates = np.concatenate([[speed[before]], speed[inside]])
            work = float(np.sum(np.diff(corners) * rates))
            assert unit_ps - 1e-6 * unit_ps <= work <= unit_ps * (1 + 1e-6) + 1.0
            checked += len(rates) > 1
    assert checked > 50


def test_recording_finds_room_for_any_number_of_rows() -> None:
    b = ProgramBuilder()
    hbm = b.add_resource(1e12)
    gpu = b.add_pool(2)
    for _ in range(2):
        b.add_blocks(stream=b.add_stream(), pool=gpu, units=3000, unit_ps=10, sm=1, demands={hbm: 8.0})
    b.add_flow(stream=b.add_stream(), pool=gpu, units=3000, unit_ps=3, sm=0, demands={hbm: 1.0})
    timeline = run(b.freeze(), record=True)
    assert timeline.cohorts is not None
    assert timeline.speeds is not None
    assert len(timeline.cohorts.task) == 9000
    assert np.bincount(timeline.cohorts.task).tolist() == [3000] * 3
    assert len(timeline.speeds.task) >= 3


def test_crews_of_one_instant_are_one_row() -> None:
    """Two CTAs that were granted apart meet at a gate and go on together."""
    b = ProgramBuilder()
    gpu = b.add_pool(2)
    opener = b.add_host(unit_ps=100, host=1)
    b.add_flow(stream=b.add_stream(priority=1), pool=gpu, units=1, unit_ps=30, sm=1)
    kernel = b.add_blocks(stream=b.add_stream(), pool=gpu, units=6, unit_ps=10, sm=2, persistent=True)
    b.add_edge(opener, kernel, dst_unit=2)
    cohorts = run(b.freeze(), record=True).cohorts
    assert cohorts is not None
    mine = cohorts.task == kernel
    rows = zip(
        cohorts.start_ps[mine].tolist(), cohorts.end_ps[mine].tolist(), cohorts.units[mine].tolist(), strict=True
    )
    assert list(rows) == [(0, 10, 1), (30, 40, 1), (100, 110, 2), (110, 120, 2)]


@pytest.mark.parametrize("seed", range(3))
def test_contenders_of_one_instant_stand_in_line_by_index(seed: int) -> None:
    """Whatever the order in which the engine finds them eligible."""
    b = ProgramBuilder()
    gpu = b.add_pool(1)
    opener = b.add_blocks(stream=b.add_stream(), pool=gpu, units=1, unit_ps=5, sm=1)
    num = 700
    tasks = [b.add_blocks(stream=b.add_stream(), pool=gpu, units=1, unit_ps=1, sm=1, host=k % 7) for k in range(num)]
    for task in random.Random(seed).sample(tasks, num):
        b.add_edge(opener, task)
    assert run(b.freeze()).t_start[tasks].tolist() == list(range(5, 5 + num))


def test_side_by_side_is_one_event() -> None:
    b = ProgramBuilder()
    gpu = b.add_pool(2**10)
    tasks = [
        b.add_blocks(stream=b.add_stream(), pool=gpu, units=2**20, unit_ps=7, sm=2**10, persistent=persistent)
        for persistent in (True, False)
    ]
    timeline = run(b.freeze(), record=True)
    assert timeline.t_end.tolist() == [7 * 2**10, 14 * 2**10]
    assert timeline.cohorts is not None
    assert np.bincount(timeline.cohorts.task).tolist() == [2**10] * len(tasks)


def test_runs_in_threads() -> None:
    programs = [random_program(seed) for seed in SEEDS]
    expected = [values(run(program)) for program in programs]
    fresh = [random_program(seed) for seed in SEEDS] + [programs[0]] * 20
    with ThreadPoolExecutor(4) as threads:
        got = [values(t) for t in threads.map(run, fresh)]
    assert got == expected + [expected[0]] * 20


@compiled
def add_product(a: float, b: float, c: float) -> float:
    return a + b * c


@compiled
def subtract_product(a: float, b: float, c: float) -> float:
    return a - b * c


@pytest.mark.parametrize("function", [add_product, subtract_product])
def test_products_are_rounded_before_they_are_added(function: Callable[..., float]) -> None:
    """A fused multiply-add would differ from plain Python in about every fourth of these."""
    rng = random.Random(1)
    sign = 1.0 if function is add_product else -1.0
    for _ in range(2000):
        b, c = rng.random(), rng.random()
        a = -sign * b * c * (1 + rng.choice([0.0, 1e-3, 0.5]) * rng.random())
        assert function(a, b, c) == a + sign * (b * c)


def test_a_changed_callee_is_compiled_again(tmp_path: Path) -> None:
    """The disk cache of a caller must not outlive a change in the file of its callee."""
    (tmp_path / "caller.py").write_text(
        "from overlapsim.jit import compiled\n"
        "from kernel_callee import inner\n"
        "@compiled\n"
        "def outer(x):\n"
        "    return inner(x) + 1\n"
    )

    def outer_of_one(factor: int) -> str:
        (tmp_path / "kernel_callee.py").write_text(
            f"from overlapsim.jit import borrowing\n@borrowing\ndef inner(x):\n    return x * {factor}\n"
        )
        command = [sys.executable, "-B", "-c", "from caller import outer; print(outer(1))"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    assert outer_of_one(10) == "11"
    assert list(tmp_path.rglob("*.nbi"))  # a cache there is, or this shows nothing
    assert outer_of_one(20) == "21"
