"""Workers of a dask.distributed cluster, by the address of its scheduler."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Final

from overlapsim.errors import UsageError
from overlapsim.sweep.processes import Answers
from overlapsim.sweep.task import Task, answer_task

CONNECT_S: Final = 10.0
"""A scheduler that has not answered by then is not there."""
SCHEMES: Final = ("tcp://", "tls://", "ws://", "wss://", "ucx://")
"""Protocols of dask.distributed (its documentation, "Communications")."""


class ClusterWorkers:
    """All workers of a cluster.

    Parameters
    ----------
    address : of the scheduler, such as ``tcp://10.0.0.1:8786``
    answer : what workers do with a task; a function that they can import

    Raises
    ------
    UsageError
        If dask.distributed is not installed, or no scheduler answers.
    """

    def __init__(self, address: str, answer: Any = answer_task) -> None:
        if not address.startswith(SCHEMES):
            raise UsageError(f"--scheduler is {address!r}; expected an address such as tcp://10.0.0.1:8786")
        try:
            from distributed import Client, KilledWorker
        except ImportError:
            raise UsageError(
                "--scheduler needs dask.distributed; install it with: pip install 'overlapsim[cluster]'"
            ) from None
        self._killed = KilledWorker
        self._answer = answer
        self._address = address
        try:
            self._client = Client(address, timeout=CONNECT_S, set_as_default=False)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"no scheduler answers at {address} ({' '.join(str(error).split())}); start one with `dask scheduler` "
                "and workers with `dask worker`"
            ) from None
        # Equal tasks are asked again on purpose: after a worker was lost.
        self._executor = self._client.get_executor(pure=False)

    def num_slots(self) -> int:
        """Threads of all workers; 0 while none has joined."""
        return sum(self._client.nthreads().values())

    def submit(self, task: Task) -> Future[Answers]:
        """Hand a task to the cluster; it is done again elsewhere if its worker is lost."""
        future: Future[Answers] = self._executor.submit(self._answer, task)
        return future

    def is_loss(self, error: BaseException) -> bool:
        """Whether an error of a task says that it was given up because several workers died with it."""
        return isinstance(error, self._killed)

    def renew(self) -> None:
        """Nothing to do: workers join and leave by themselves."""

    def close(self) -> None:
        """Take back what is not done, and leave the cluster as it is."""
        self._executor.shutdown(wait=False)
        self._client.close()
