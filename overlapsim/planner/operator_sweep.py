"""Plans many operators on one cluster: model results are shared, ranges left out, processes used where asked."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from overlapsim.cost.launch import launch_stack
from overlapsim.cost.prices import PriceBook
from overlapsim.hardware.profile import Cluster
from overlapsim.plan import Cause, Verdict
from overlapsim.planner.operator import QUICK, Effort, check_tiles, plan_operator
from overlapsim.strategy.base import Context
from overlapsim.strategy.registry import load_strategies
from overlapsim.workload.operators import CollectiveKind, GemmOp, gemm_and_collective, independent_pair

CHUNK: Final = 256
"""Points that share model results and one process; dropped together, so that memory does not grow with the sweep."""


@dataclass(frozen=True)
class Question:
    """One point of a sweep.

    Attributes
    ----------
    gemm, kind, ranks : sizes on one rank, collective, and its ranks
    independent_bytes : size of a collective that is independent of the GEMM; None for one on its output (all_gather:
        on its input)
    """

    gemm: GemmOp
    kind: CollectiveKind
    ranks: int
    independent_bytes: float | None = None


@dataclass(frozen=True)
class Answer:
    """What the planner says to one question; see `OperatorResult`."""

    question: Question
    verdict: Verdict
    cause: Cause
    best: str
    serial_s: float
    best_s: float
    best_overlap: str | None
    overlap_s: float | None
    ceiling: float

    @property
    def overlap_speedup(self) -> float:
        """Best serial time over the best overlapped one; 0 where none applies."""
        return self.serial_s / self.overlap_s if self.overlap_s else 0.0


def sweep_operators(
    cluster: Cluster,
    questions: Iterable[Question],
    *,
    strategies: Sequence[str] = (),
    workers: int = 1,
    contention: bool = True,
    effort: Effort = QUICK,
    stack: str = "graph",
) -> tuple[Answer, ...]:
    """Plan every question, in order.

    Parameters
    ----------
    cluster : machine
    questions : GEMM, collective and ranks of each point
    strategies : names; all by default
    workers : processes; 1 stays in this one
    contention : False leaves HBM and link sharing out
    effort : how hard to look at each point
    stack : how the host launches kernels (``cost/launch.py``)

    Raises
    ------
    StrategyError, WorkloadError, UsageError
        As `plan_operator` does for the first question that cannot be answered.
    """
    asked = list(questions)
    chunks = [asked[i : i + CHUNK] for i in range(0, len(asked), CHUNK)]
    jobs = [(cluster, chunk, tuple(strategies), contention, effort, stack) for chunk in chunks]
    if workers <= 1 or len(chunks) < 2:
        parts = [_plan_chunk(*job) for job in jobs]
    else:
        # Forking is unsafe once compiled code has started threads.
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            parts = list(pool.map(_plan_job, jobs))
    return tuple(answer for part in parts for answer in part)


def _plan_job(job: tuple[Any, ...]) -> list[Answer]:
    return _plan_chunk(*job)


def _plan_chunk(
    cluster: Cluster,
    questions: Sequence[Question],
    names: Sequence[str],
    contention: bool,
    effort: Effort,
    stack: str,
) -> list[Answer]:
    strategies = load_strategies(names, "pair")
    models: dict[tuple[Any, ...], Any] = {}
    host = launch_stack(stack, cluster.device)
    answers = []
    for question in questions:
        check_tiles(question.gemm, cluster)
        prices = PriceBook(cluster, question.ranks, gemm=question.gemm, kind=question.kind, models=models, stack=host)
        shape = (question.gemm, question.kind, question.ranks)
        size_bytes = question.independent_bytes
        graph = gemm_and_collective(*shape) if size_bytes is None else independent_pair(*shape, size_bytes)
        result = plan_operator(Context(graph, prices), strategies, contention=contention, effort=effort)
        assert result.serial.best is not None and result.best.best is not None
        overlapping = [r.best for r in result.results if r.best is not None and r.strategy.overlaps]
        fastest = min(overlapping, key=lambda candidate: candidate.predicted_s, default=None)
        answers.append(
            Answer(
                question,
                result.verdict,
                result.cause,
                result.best.strategy.name,
                result.serial.best.predicted_s,
                result.best.best.predicted_s,
                None if fastest is None else fastest.strategy.name,
                None if fastest is None else fastest.predicted_s,
                result.ceiling,
            )
        )
    return answers
