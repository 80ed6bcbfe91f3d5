"""Workers on this machine: a pool of processes that end with the process that started them, however that ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any

from overlapsim.sweep.task import Answered, Task, answer_task

Answers = tuple[tuple[Answered, ...], float]


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


class ProcessWorkers:
    """A pool of processes.

    Parameters
    ----------
    count : processes
    answer : what they do with a task; an importable function
    """

    def __init__(self, count: int, answer: Any = answer_task) -> None:
        self.count = count
        self._answer = answer
        self._start()

    def _start(self) -> None:
        # Forking is unsafe once compiled code has started threads.
        context = multiprocessing.get_context("spawn")
        # Only this process holds the end that is written to: when it closes it or is killed, the workers read its end.
        life, self._life = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(self.count, context, initializer=_begin, initargs=(life,))

    def num_slots(self) -> int:
        """Tasks that run at the same time."""
        return self.count

    def submit(self, task: Task) -> Future[Answers]:
        """Hand a task to a process."""
        return self._pool.submit(self._answer, task)

    def is_loss(self, error: BaseException) -> bool:
        """Whether an error of a task says that a process died, not necessarily the one that had the task."""
        return isinstance(error, BrokenProcessPool)

    def renew(self) -> None:
        """Start a new pool after a loss: the old one takes no tasks any more."""
        self.close()
        self._start()

    def close(self) -> None:
        """End the processes at once."""
        self._life.close()
        self._pool.shutdown(wait=True, cancel_futures=True)


def _begin(life: Connection) -> None:
    """First thing in a worker: leave Ctrl-C to the parent, and end when it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            life.recv_bytes()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
