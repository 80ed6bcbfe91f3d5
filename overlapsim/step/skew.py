"""Rank skew behind slow hosts: ranks whose launches take unequal times, and collectives that wait for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from overlapsim.cost.launch import LaunchStack
from overlapsim.schedule.program import FLOW, Int, Program

MOST_RANKS: Final = 8
"""Ranks of a group that are simulated one by one: those of a node."""
SEED: Final = 2022
NORMAL_90: Final = 3.2897
"""Width of the central 90 % of a normal distribution, in standard deviations."""


@dataclass(frozen=True)
class Skew:
    """How the hosts of a group differ.

    Attributes
    ----------
    ranks : simulated, at most `MOST_RANKS`
    sigma : standard deviation of the logarithm of a launch's time
    seed : of the draws
    """

    ranks: int
    sigma: float
    seed: int = SEED

    @classmethod
    def of(cls, hosts: LaunchStack, ranks: int) -> Skew:
        """The spread of host time, taken launch by launch: no host is slow for good.

        Examples
        --------
        >>> from overlapsim.cost.launch import launch_stack
        >>> round(Skew.of(launch_stack("megatron-2021"), 64).sigma, 3)
        0.167
        """
        return cls(min(ranks, MOST_RANKS), float(np.log(hosts.spread.high / hosts.spread.low)) / NORMAL_90)


def spread_ranks(program: Program, skew: Skew) -> Program:
    """The program of one rank for several, each with a GPU, a host and launch times of its own.

    Transfers of one rank become groups over all: a rank that is early holds its SMs and waits. What the ranks share
    (root ports, NICs) each has for itself, as the one rank's prices have it.

    Parameters
    ----------
    program : of one device, nothing in groups
    skew : how many ranks, and how their hosts differ

    Returns
    -------
    Program
        Tasks of rank r stand at ``r * num_tasks`` and on, in the order they had.
    """
    ranks, tasks = skew.ranks, program.num_tasks
    assert (program.group < 0).all(), "one rank's transfers are not in groups yet"
    number = np.repeat(np.arange(ranks, dtype=np.int64), tasks)
    # A task of several kernels has as many launches: their sum spreads less.
    one = program.launch_ps[program.launch_ps > 0].min(initial=1 << 46)
    sigma = skew.sigma / np.sqrt(np.maximum(1.0, np.tile(program.launch_ps, ranks) / one))
    draws = np.random.default_rng(skew.seed).normal(0.0, 1.0, ranks * tasks)
    # Mean 1, so that a stack's host time stays what it is.
    launch = np.tile(program.launch_ps, ranks) * np.exp(sigma * draws - sigma**2 / 2)
    lanes = int(program.host.max(initial=0)) + 1
    queues = np.unique(program.stream_queue, return_inverse=True)[1].astype(np.int64)
    flow = np.tile(program.kind == FLOW, ranks)
    demands = np.diff(program.demand_ptr)
    edge_rank = np.repeat(np.arange(ranks, dtype=np.int64), program.num_edges)

    def tiled(values: Int, step: int = 0) -> Int:
        """Once a rank, `step` higher each time."""
        found: Int = np.tile(values, ranks) + step * np.repeat(np.arange(ranks, dtype=np.int64), len(values))
        return found

    return replace(
        program,
        pool_num_sms=tiled(program.pool_num_sms),
        pool_derate=np.tile(program.pool_derate, ranks),
        pool_device=tiled(program.pool_device, int(program.pool_device.max(initial=0)) + 1),
        pool_name=program.pool_name * ranks,
        resource_capacity=np.tile(program.resource_capacity, ranks),
        resource_name=program.resource_name * ranks,
        stream_priority=tiled(program.stream_priority),
        stream_queue=tiled(queues, len(queues)),
        stream_name=program.stream_name * ranks,
        kind=tiled(program.kind),
        host=tiled(program.host) + lanes * number,
        launch_ps=np.rint(launch).astype(np.int64),
        stream=np.where(np.tile(program.stream, ranks) < 0, -1, tiled(program.stream) + program.num_streams * number),
        pool=np.where(np.tile(program.pool, ranks) < 0, -1, tiled(program.pool) + program.num_pools * number),
        units=tiled(program.units),
        unit_ps=tiled(program.unit_ps),
        sm=tiled(program.sm),
        sm_quantum=tiled(program.sm_quantum),
        persistent=np.tile(program.persistent, ranks),
        group=np.where(flow, tiled(np.arange(tasks, dtype=np.int64)), -1),
        weight=np.tile(program.weight, ranks),
        demand_ptr=np.concatenate(([0], np.cumsum(np.tile(demands, ranks)))).astype(np.int64),
        demand_resource=tiled(program.demand_resource, program.num_resources),
        demand_amount=np.tile(program.demand_amount, ranks),
        edge_src=tiled(program.edge_src) + tasks * edge_rank,
        edge_src_units=tiled(program.edge_src_units),
        edge_dst=tiled(program.edge_dst) + tasks * edge_rank,
        edge_dst_unit=tiled(program.edge_dst_unit),
        edge_lag_ps=tiled(program.edge_lag_ps),
        op=program.op * ranks,
        tag=program.tag * ranks,
        mem_start=np.tile(program.mem_start, ranks),
        mem_end=np.tile(program.mem_end, ranks),
    )


def may_wait_for_host(program: Program, busy_s: float, hosts: LaunchStack) -> bool:
    """Whether launches, slow ones at that, could take longer than the GPU does; an idle GPU waits for the first."""
    launches = program.launch_ps.sum()
    return bool(launches * hosts.spread.high > busy_s * 1e12 or (hosts.meets_each_pass and launches))


def rank_tasks(program: Program, rank: int, skew: Skew) -> Int:
    """Tasks of one rank in a program of `spread_ranks`."""
    own = program.num_tasks // skew.ranks
    return np.arange(rank * own, (rank + 1) * own, dtype=np.int64)
