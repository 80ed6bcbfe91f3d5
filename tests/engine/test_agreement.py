"""The engines agree to the picosecond on random programs, and have the properties of docs/program.md section 4."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overlapsim.engine import compiled, reference
from overlapsim.engine.timeline import Timeline
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import FLOW, HOST, Program
from overlapsim.testing.programs import features, happenings, random_program

ENGINES = pytest.mark.parametrize("run", [reference.run, compiled.run], ids=["reference", "compiled"])
NUM_SLOW, CHUNKS = 16_000, 8
"""Programs of the slow set, in as many tests as keep two workers busy."""
NUM_FAST = 300
FAST_SEEDS = range(1_000_000, 1_000_000 + NUM_FAST)

RUN_ARRAYS = ("t_issued", "t_eligible", "t_resident", "t_start", "t_end", "progress", "held_sm")

EVERY_FEATURE = frozenset(
    {
        "uncontended machine", "finite capacity", "infinite capacity", "several finite resources", "like resources",
        "derate", "weight", "wave-group signal", "wave-group signal with lag", "wait with lag", "unit gate",
        "unit gate with lag", "gate into group", "backward gate", "gate on itself", "group", "folded group",
        "group over several pools", "group with unequal times", "shared queue", "several host lanes", "host task",
        "host task of 0 ps", "persistent kernel", "persistent kernel of several rounds", "sm_quantum",
        "persistent kernel with sm_quantum", "copy engine", "flow without SMs", "priorities", "launch time",
        "equal times", "several pools", "over 40 tasks", "over 100 units",
    }
)  # fmt: skip
EVERY_HAPPENING = frozenset(
    {
        "deadlock", "flow waited for SMs", "blocks waited for SMs", "spinning at a gate",
        "group member waited for others", "issued before eligible", "host task waited", "equal ends",
        "late persistent worker", "slowed", "several speeds at one instant",
    }
)  # fmt: skip


def differences(a: Timeline, b: Timeline) -> list[str]:
    """Names of the arrays in which two runs differ, bit for bit; cohorts and speeds where both have them."""
    names = [name for name in RUN_ARRAYS if not np.array_equal(getattr(a, name), getattr(b, name))]
    for part in ("cohorts", "speeds"):
        one, other = getattr(a, part), getattr(b, part)
        if one is not None and other is not None:
            for field in fields(one):
                if not np.array_equal(getattr(one, field.name), getattr(other, field.name)):
                    names.append(f"{part}.{field.name}")
    return names


def check_seed(seed: int) -> tuple[Program, Timeline]:
    """Assert that the engines agree on one random program, contention on and off, recording or not."""
    program = random_program(seed)
    expected = reference.run(program, record=True)
    for other, how in (
        (compiled.run(program, record=True), "contention on, recorded"),
        (compiled.run(program), "contention on"),
    ):
        assert not differences(expected, other), f"random_program({seed}), {how}: {differences(expected, other)} differ"
    off = reference.run(program, contention=False, record=True)
    for other, how in (
        (compiled.run(program, contention=False, record=True), "contention off, recorded"),
        (compiled.run(program.without_contention()), "without_contention()"),
    ):
        assert not differences(off, other), f"random_program({seed}), {how}: {differences(off, other)} differ"
    return program, expected


@pytest.mark.parametrize("chunk", range(10))
def test_agree(chunk: int) -> None:
    for seed in FAST_SEEDS[chunk::10]:
        check_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_agree_on_many(chunk: int, record_property: Callable[[str, Any], None]) -> None:
    counts: Counter[str] = Counter()
    seeds = range(chunk, NUM_SLOW, CHUNKS)
    for seed in seeds:
        program, timeline = check_seed(seed)
        counts.update(features(program) | happenings(timeline))
    # Summed over the chunks and printed by conftest.py at the end of the session.
    record_property("random programs", len(seeds))
    record_property("random program counts", dict(counts))
    assert set(counts) <= EVERY_FEATURE | EVERY_HAPPENING
    rare = {name: counts[name] for name in EVERY_FEATURE | EVERY_HAPPENING if counts[name] * CHUNKS < 200}
    assert not rare, f"the generator reaches these in fewer than 200 of {NUM_SLOW} programs: {rare} in this chunk"
    assert counts["deadlock"] <= len(seeds) / 3


@ENGINES
def test_one_runner_ends_at_its_cost(run: Callable[..., Timeline]) -> None:
    """Whatever it demands, however its pool is derated: alone, nobody is slowed."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        units, sm, unit_ps = (int(x) for x in rng.integers(1, (40, 9, 10**7)))
        b = ProgramBuilder()
        pools = [b.add_pool(8, derate=0.5), b.add_pool(8, derate=0.25)]
        demands = {b.add_resource(float(c)): float(d) for c, d in rng.uniform(1e-3, 1e15, (2, 2))}
        weight = float(rng.uniform(0.01, 100))
        kind = seed % 3
        if kind == 0:
            persistent = bool(rng.integers(2))
            b.add_blocks(
                stream=b.add_stream(), pool=pools[0], units=units, unit_ps=unit_ps, sm=sm, persistent=persistent,
                demands=demands, weight=weight,
            )  # fmt: skip
            cost = -(-units // sm) * unit_ps
        else:
            times = [unit_ps, *rng.integers(1, 10**7, kind - 1).tolist()]
            for pool, member_ps in zip(pools, times, strict=False):
                b.add_flow(
                    stream=b.add_stream(), pool=pool, units=units, unit_ps=member_ps, sm=sm - 1, group=3,
                    demands=demands, weight=weight,
                )  # fmt: skip
            cost = units * max(times)
        program = b.freeze()
        assert run(program).end_ps == run(program, contention=False).end_ps == cost


@ENGINES
def test_no_deadlock_without_groups_and_gates(run: Callable[..., Timeline]) -> None:
    for seed in range(200):
        p = random_program(seed)
        waits = p.edge_dst_unit < 0
        edges = {name: getattr(p, name)[waits] for name in vars(p) if name.startswith("edge_")}
        program = Program(
            **{f.name: getattr(p, f.name) for f in fields(p)} | edges | {"group": np.full_like(p.group, -1)}
        )
        timeline = run(program)
        assert timeline.complete, f"random_program({seed}) without groups and gates stopped"
        assert not timeline.held_sm.any()


@ENGINES
def test_wave_group_recurrence(run: Callable[..., Timeline]) -> None:
    """C_j = max(w * ceil(G_j / sm), C_{j-1}) + tau_j with the collectives' SMs reserved; G_j cumulative tiles."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        num_sms = int(rng.integers(2, 9))
        reserved = int(rng.integers(1, num_sms))
        sm = num_sms - reserved
        tiles = int(rng.integers(1, 60))
        wave_ps = int(rng.integers(1, 1000))
        count = int(rng.integers(1, min(tiles, 6) + 1))
        ends = [*sorted(rng.choice(np.arange(1, tiles), count - 1, replace=False).tolist()), tiles]
        taus = rng.integers(1, 3 * wave_ps + 1, count).tolist()
        b = ProgramBuilder()
        gpu = b.add_pool(num_sms)
        comm = b.add_stream(priority=5)
        gemm = b.add_blocks(stream=b.add_stream(), pool=gpu, units=tiles, unit_ps=wave_ps, sm=sm)
        for end, tau in zip(ends, taus, strict=True):
            flow = b.add_flow(stream=comm, pool=gpu, units=1, unit_ps=tau, sm=reserved)
            b.add_edge(gemm, flow, src_units=end)
        expected, previous = [wave_ps * -(-tiles // sm)], 0
        for end, tau in zip(ends, taus, strict=True):
            previous = max(wave_ps * -(-end // sm), previous) + tau
            expected.append(previous)
        assert run(b.freeze(), contention=False).t_end.tolist() == expected


@ENGINES
def test_running_twice_is_identical(run: Callable[..., Timeline]) -> None:
    for seed in range(40):
        program = random_program(seed)
        first = run(program, record=True)
        run(random_program(seed + 1), record=True)
        assert not differences(first, run(program, record=True))
        assert not differences(first, run(random_program(seed)))


@ENGINES
def test_saved_program_runs_alike(run: Callable[..., Timeline], tmp_path: Path) -> None:
    for seed in range(25):
        program = random_program(seed)
        program.save(tmp_path / "program.npz")
        loaded = Program.load(tmp_path / "program.npz")
        assert loaded == program
        assert loaded.digest == program.digest
        assert not differences(run(program), run(loaded))


@ENGINES
def test_numbers_of_pools_resources_groups_queues_and_lanes_mean_nothing(run: Callable[..., Timeline]) -> None:
    """Only the order of tasks is order: all else is a name, and names may be permuted."""
    for seed in range(100):
        p = random_program(seed)
        rng = np.random.default_rng(seed)
        pool, resource, stream = (rng.permutation(n) for n in (p.num_pools, p.num_resources, p.num_streams))
        lanes = rng.permutation(int(p.host.max()) + 1)
        group = rng.permutation(int(p.group.max()) + 2)
        queue = {number: n for n, number in enumerate(rng.permutation(np.unique(p.stream_queue)))}
        renamed = replace(
            p,
            pool_num_sms=p.pool_num_sms[np.argsort(pool)],
            pool_derate=p.pool_derate[np.argsort(pool)],
            resource_capacity=p.resource_capacity[np.argsort(resource)],
            stream_priority=p.stream_priority[np.argsort(stream)],
            stream_queue=np.array([queue[q] for q in p.stream_queue], np.int64)[np.argsort(stream)],
            stream=np.where(p.stream >= 0, stream[p.stream], -1),
            pool=np.where(p.pool >= 0, pool[p.pool], -1),
            demand_resource=resource[p.demand_resource] if p.num_resources else p.demand_resource,
            group=np.where(p.group >= 0, group[p.group], -1),
            host=lanes[p.host],
        )
        assert not differences(run(p, record=True), run(renamed, record=True)), f"random_program({seed})"


@ENGINES
def test_work_is_conserved_and_sms_are_not_oversold(run: Callable[..., Timeline]) -> None:
    for seed in range(100):
        timeline = run(random_program(seed), record=True)
        p, c = timeline.program, timeline.cohorts
        assert c is not None
        done = np.bincount(c.task, c.units, minlength=p.num_tasks)
        assert np.all(done >= timeline.progress)
        assert np.array_equal(done[timeline.t_end >= 0], p.units[timeline.t_end >= 0])
        held = np.where(p.kind[c.task] == FLOW, p.sm[c.task], c.units)
        for pool in range(p.num_pools):
            mine = (p.pool[c.task] == pool) & (p.kind[c.task] != HOST)
            changes = np.concatenate([c.start_ps[mine], c.end_ps[mine]])
            amounts = np.concatenate([held[mine], -held[mine]])
            # Ends before starts at one instant.
            order = np.lexsort((amounts, changes))
            assert np.cumsum(amounts[order]).max(initial=0) <= p.pool_num_sms[pool]
