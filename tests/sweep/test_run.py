"""Every point once, whatever happens to workers; what is said on the way."""

from __future__ import annotations

import csv
import re
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import pytest

from overlapsim.errors import UsageError
from overlapsim.sweep.processes import Answers, ProcessWorkers
from overlapsim.sweep.progress import Progress
from overlapsim.sweep.run import DIED
from overlapsim.sweep.task import Task, answer_task
from tests.sweep.parts import POISON, Inline, canned, operators, poisoned, run


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_fault_of_ours_is_a_row_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*args: object, **kwargs: object) -> None:
        raise KeyError("a\nb")

    monkeypatch.setattr("overlapsim.sweep.operators.plan_operator", faulty)
    done = run(operators("[64]"), tmp_path / "out.csv")
    assert done.statuses == {"failed": 1, "infeasible": 1}
    assert rows_of(tmp_path / "out.csv")[0]["reason"] == "KeyError: 'a\\nb'"


class Losing(Inline):
    """Loses tasks that hold a point, and with them all that are on their way: as a pool of processes does."""

    def __init__(self, poison: int, on_submit: bool = False) -> None:
        super().__init__(canned)
        self.poison, self.on_submit = poison, on_submit
        self.waiting: list[tuple[Task, Future[Answers]]] = []
        self.renewed = 0
        self.broken = False

    def submit(self, task: Task) -> Future[Answers]:
        if self.broken:
            raise ConnectionError("broken")
        future = super().submit(task)
        if any(given["m"] == self.poison for _, given in task.points):
            self.broken = True
            if self.on_submit:
                raise ConnectionError("died")
            future = Future()
            future.set_exception(ConnectionError("died"))
        return future

    def renew(self) -> None:
        self.renewed += 1
        self.broken = False


@pytest.mark.parametrize("on_submit", [False, True])
def test_the_point_that_kills_its_worker_is_found(tmp_path: Path, on_submit: bool) -> None:
    workers = Losing(192, on_submit)
    done = run(operators("[64, 128, 192, 256, 320, 384]"), tmp_path / "out.csv", workers)
    assert done.statuses == {"ok": 10, "failed": 2}
    rows = rows_of(tmp_path / "out.csv")
    assert [row["m"] for row in rows if row["status"] == "failed"] == ["192", "192"]
    assert {row["reason"] for row in rows if row["status"] == "failed"} == {DIED}
    assert len(rows) == len({row["id"] for row in rows}) == 12
    assert workers.renewed >= 2


def test_workers_that_never_start_are_not_blamed_on_points(tmp_path: Path) -> None:
    class Dead(Inline):
        def submit(self, task: Task) -> Future[Answers]:
            raise ConnectionError("cannot start")

    with pytest.raises(UsageError, match="before they answer anything"):
        run(operators("[64]"), tmp_path / "out.csv", Dead())
    assert not rows_of(tmp_path / "out.csv")


def test_workers_that_are_gone_end_the_run_and_keep_what_is_there(tmp_path: Path) -> None:
    class Leaving(Inline):
        def submit(self, task: Task) -> Future[Answers]:
            future = super().submit(task)
            if len(self.tasks) < 4:
                return future
            gone: Future[Answers] = Future()
            gone.cancel()
            gone.set_running_or_notify_cancel()
            return gone

    with pytest.raises(UsageError, match="carries on where this one ended"):
        run(operators("[64, 128, 192]"), tmp_path / "out.csv", Leaving(canned))
    before = len(rows_of(tmp_path / "out.csv"))
    done = run(operators("[64, 128, 192]"), tmp_path / "out.csv", Inline(canned))
    assert (done.num_done_before, done.num_run) == (before, 6 - before)


def test_another_version_is_refused() -> None:
    with pytest.raises(UsageError, match="expected the same version"):
        answer_task(Task("operator", (), {}, {}, version="0.0.1"))


def test_tasks_grow_with_fast_points_and_leave_something_for_all(tmp_path: Path) -> None:
    workers = Inline(canned)  # 1 ms a point
    run(operators(str(list(range(64, 64 + 600)))), tmp_path / "out.csv", workers)
    sizes = [len(task.points) for task in workers.tasks]
    assert sizes[:2] == [0, 1] and max(sizes) == 256 and sizes[-1] == 1
    assert sum(sizes) == 1200


def test_real_processes_and_a_point_that_kills_them(tmp_path: Path) -> None:
    workers = ProcessWorkers(2, poisoned)
    try:
        done = run(operators(f"[64, 128, {POISON}, 256, 320]"), tmp_path / "out.csv", workers)
    finally:
        workers.close()
    assert done.statuses == {"ok": 8, "failed": 2}
    rows = rows_of(tmp_path / "out.csv")
    assert {row["m"] for row in rows if row["status"] == "failed"} == {str(POISON)}
    assert Counter(row["id"] for row in rows).most_common(1)[0][1] == 1


def test_progress() -> None:
    """Time left at the rate since the first arrival; a line when something came, now and then when nothing did."""
    now, said = [0.0], []
    progress = Progress(100, 20, said.append, clock=lambda: now[0])
    now[0] = 10.0
    progress.add(10, {"ok": 10})
    progress.tick()
    now[0] = 11.0
    progress.add(10, {"ok": 18, "infeasible": 2})
    progress.tick()  # too soon
    now[0] = 20.0
    progress.tick()
    progress.tick()
    now[0] = 60.0
    progress.tick()
    progress.add(60, {"ok": 78, "infeasible": 2})
    progress.end()
    assert said == [
        "20 of 100 points are there already",
        "30 of 100 points",
        "40 of 100 points, 2 infeasible, about 60 s left",
        "40 of 100 points, 2 infeasible, about 5 min left",
        "100 of 100 points, 2 infeasible",
    ]
    assert all(re.match(r"[\d,]+ of", line) for line in said)
