"""Runs a sweep: hands points to workers, stores rows as they come, and carries on where an earlier run ended."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass
from typing import Final, Protocol

from overlapsim.errors import UsageError
from overlapsim.sweep.keys import Cell
from overlapsim.sweep.kinds import FAILED
from overlapsim.sweep.processes import Answers
from overlapsim.sweep.progress import Progress
from overlapsim.sweep.spec import Point, Sweep
from overlapsim.sweep.store import Store
from overlapsim.sweep.task import Answered, Task

TASK_S: Final = 0.5
"""Work in one task: a task costs some milliseconds on a cluster, and what a lost worker had is done again."""
MOST_IN_TASK: Final = 256
WAIT_S: Final = 1.0
"""How long news of workers is waited for before progress is looked at."""
DIED: Final = "the process that answered it ended without an answer: killed, or out of memory"


class Workers(Protocol):
    """Who answers tasks: processes of this machine, or a cluster."""

    def num_slots(self) -> int:
        """Tasks that run at the same time."""

    def submit(self, task: Task) -> Future[Answers]:
        """Hand over a task."""

    def is_loss(self, error: BaseException) -> bool:
        """Whether an error of a task says that workers died."""

    def renew(self) -> None:
        """After a loss: be ready for tasks again."""

    def close(self) -> None:
        """Stop, with what is not done."""


@dataclass(frozen=True)
class Summary:
    """What became of a sweep.

    Attributes
    ----------
    num_points, num_done_before, num_run : of the spec, found in the results, answered now
    statuses : rows by status, of all points
    elapsed_s : now
    """

    num_points: int
    num_done_before: int
    num_run: int
    statuses: Mapping[str, int]
    elapsed_s: float


def left_over(sweep: Sweep, store: Store) -> list[Point]:
    """Points that the results do not have yet.

    Raises
    ------
    UsageError
        If the results have points that the sweep does not ask for.
    """
    strange = set(store.done) - {point.id for point in sweep.points}
    if strange:
        raise UsageError(
            f"the results hold {len(strange)} point(s) that this sweep does not ask for: its values, a profile, a "
            "model or the version of overlapsim changed since; give another name, or ask for them too"
        )
    return [point for point in sweep.points if point.id not in store.done]


def run_sweep(sweep: Sweep, store: Store, workers: Workers, tell: Callable[[str], None]) -> Summary:
    """Answer all points that the results do not have yet.

    Rows are stored as they arrive; a run that is killed at any moment is
    continued by the same call, and every point ends up there once.

    Parameters
    ----------
    sweep : what is asked
    store : opened; where rows go
    workers : who answers
    tell : says how far it is

    Raises
    ------
    UsageError
        If the results belong to another sweep, or the workers are gone or run another version.
    """
    began = time.monotonic()
    pending = left_over(sweep, store)
    run = _Run(sweep, store, workers, Progress(len(sweep.points), len(store.done), tell))
    before = Counter(store.done.values())
    try:
        run.answer_all(pending)
        store.finish([point.id for point in sweep.points])
    finally:
        store.flush()
    statuses = before + run.statuses
    return Summary(len(sweep.points), len(store.done), len(pending), dict(statuses), time.monotonic() - began)


class _Run:
    """Points on their way: pending, with workers, or suspected of killing one.

    When workers die, which of the points that were with them is to blame
    cannot be told.  Each is asked again alone; one that then takes its
    process with it has its row.
    """

    def __init__(self, sweep: Sweep, store: Store, workers: Workers, progress: Progress) -> None:
        self._sweep, self._store, self._workers, self._progress = sweep, store, workers, progress
        self._pending: deque[Point] = deque()
        self._suspects: deque[tuple[Point, ...]] = deque()
        self._running: dict[Future[Answers], tuple[Point, ...]] = {}
        self._alone = self._broken = False
        self._points, self._seconds = 0, 0.0
        self.statuses: Counter[str] = Counter()

    def answer_all(self, points: Sequence[Point]) -> None:
        if not points:
            return
        self._pending.extend(points)
        # No point: shows whether workers start at all, before that is blamed on points.
        self._submit(())
        while self._pending or self._suspects or self._running:
            self._hand_out()
            ended, _ = wait(self._running, timeout=WAIT_S, return_when=FIRST_COMPLETED)
            for future in ended:
                self._collect(future, self._running.pop(future))
            self._progress.tick()
        self._progress.end()

    def _hand_out(self) -> None:
        if self._running and (self._suspects or self._alone or self._broken):
            return
        if self._broken:
            self._workers.renew()
        self._alone, self._broken = bool(self._suspects), False
        if self._suspects:
            self._submit(self._suspects.popleft())
            return
        slots = self._workers.num_slots()
        if not slots:
            self._progress.say("no worker has joined yet")
        while self._pending and not self._broken and len(self._running) < max(1, 2 * slots):
            self._submit(tuple(self._pending.popleft() for _ in range(self._task_size(slots))))

    def _task_size(self, slots: int) -> int:
        """Points that take about `TASK_S`, and no more than leaves something for all at the end."""
        if not self._points:
            return 1
        fair = len(self._pending) // (2 * max(1, slots))
        fitting = TASK_S * self._points / max(self._seconds, 1e-9)
        return max(1, int(min(MOST_IN_TASK, fair, fitting)))

    def _submit(self, points: tuple[Point, ...]) -> None:
        sweep = self._sweep
        asked = tuple((point.id, sweep.given(point)) for point in points)
        clusters = {str(given["cluster"]): sweep.clusters[str(given["cluster"])] for _, given in asked}
        models = {str(given["model"]): sweep.models[str(given["model"])] for _, given in asked if "model" in given}
        try:
            future = self._workers.submit(Task(sweep.kind.name, asked, clusters, models))
        except Exception as error:
            if not self._workers.is_loss(error):
                raise
            self._lose(points)
        else:
            self._running[future] = points

    def _collect(self, future: Future[Answers], points: tuple[Point, ...]) -> None:
        try:
            answered, seconds = future.result()
        except CancelledError:
            raise UsageError("the workers are gone; the same command carries on where this one ended") from None
        except Exception as error:
            if not self._workers.is_loss(error):
                raise
            self._lose(points)
        else:
            self._points, self._seconds = self._points + len(points), self._seconds + seconds
            self._keep(points, answered)

    def _lose(self, points: tuple[Point, ...]) -> None:
        self._broken = True
        if not self._alone:
            self._suspects.extend([(point,) for point in points] or [()])
        elif points:
            self._keep(points, tuple(Answered(point.id, FAILED, DIED, {}) for point in points))
        else:
            raise UsageError("workers end before they answer anything; see what they print, and their memory")

    def _keep(self, points: tuple[Point, ...], answered: Sequence[Answered]) -> None:
        """Store the rows of some points."""
        assert [point.id for point in points] == [found.id for found in answered]
        kind = self._sweep.kind
        rows: list[tuple[Cell, ...]] = []
        for point, found in zip(points, answered, strict=True):
            cells = (found.cells.get(column.name) for column in kind.columns)
            rows.append((found.id, found.status, found.reason, *point.values, *self._sweep.digests(point), *cells))
            self.statuses[found.status] += 1
        if rows:
            self._store.append(rows)
            self._progress.add(len(rows), self.statuses)
