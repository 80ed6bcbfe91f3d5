"""Specs and workers that the tests of sweeps share; workers import their answers from here."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from overlapsim.sweep.kinds import OK
from overlapsim.sweep.processes import Answers
from overlapsim.sweep.run import Summary, run_sweep
from overlapsim.sweep.spec import Sweep, parse_sweep
from overlapsim.sweep.store import find_store
from overlapsim.sweep.task import Answered, Task, answer_task

POISON = 666
"""Rows of the GEMM whose worker dies."""


def operators(m: str, more: str = "") -> str:
    """A spec of cheap points, some of which cannot be: 16 ranks on 8 GPUs."""
    return f"""
kind: sweep
command: operator
common: {{cluster: a100-sxm8, n: 4096, k: 4096, effort: quick}}
grid:
  ranks: [2, 16]
  m: {m}
{more}"""


def canned(task: Task) -> Answers:
    """Answers at once, made of what was asked."""
    found = (Answered(id_, OK, "", {"best": "serial", "best_s": given["m"] / 3}) for id_, given in task.points)
    return tuple(found), 0.001 * len(task.points)


def poisoned(task: Task) -> Answers:
    """As `canned`, but one point takes its process with it."""
    if any(given["m"] == POISON for _, given in task.points):
        os.kill(os.getpid(), signal.SIGKILL)
    return canned(task)


class Inline:
    """Answers in this process when asked."""

    def __init__(self, answer: Callable[[Task], Answers] = answer_task) -> None:
        self.answer = answer
        self.tasks: list[Task] = []

    def num_slots(self) -> int:
        return 2

    def submit(self, task: Task) -> Future[Answers]:
        self.tasks.append(task)
        future: Future[Answers] = Future()
        try:
            future.set_result(self.answer(task))
        except Exception as error:
            future.set_exception(error)
        return future

    def is_loss(self, error: BaseException) -> bool:
        return isinstance(error, ConnectionError)

    def renew(self) -> None:
        pass

    def close(self) -> None:
        pass


def run(text: str | Sweep, path: Path, workers: Any = None, tell: Callable[[str], None] = lambda text: None) -> Summary:
    """Run a sweep into a file or folder."""
    sweep = parse_sweep(text) if isinstance(text, str) else text
    store = find_store(path, sweep.kind.row_columns)
    store.open()
    try:
        return run_sweep(sweep, store, workers or Inline(), tell)
    finally:
        store.close()
