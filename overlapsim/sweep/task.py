"""What a worker is sent and sends back: some points, each answered or with the reason why not."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlapsim import __version__
from overlapsim.errors import OverlapSimError, UsageError
from overlapsim.hardware.profile import Cluster
from overlapsim.sweep.keys import Cell
from overlapsim.sweep.kinds import FAILED, INFEASIBLE, KINDS, OK
from overlapsim.workload.model import ModelSpec


@dataclass(frozen=True, eq=False)
class Task:
    """Points for one worker, with all that they need: a worker reads no file.

    Attributes
    ----------
    command : name of the question
    points : id and values by key of each
    clusters, models : those that the points name
    version : of the program that asks
    """

    command: str
    points: tuple[tuple[str, Mapping[str, Cell]], ...]
    clusters: Mapping[str, Cluster]
    models: Mapping[str, ModelSpec]
    version: str = __version__


@dataclass(frozen=True)
class Answered:
    """What became of one point.

    Attributes
    ----------
    id : of the point
    status : `OK`, `INFEASIBLE` or `FAILED`
    reason : why it has no answer
    cells : the answer by column, empty where there is none
    """

    id: str
    status: str
    reason: str
    cells: Mapping[str, Cell]


def answer_task(task: Task) -> tuple[tuple[Answered, ...], float]:
    """Answer all points of a task; runs in a worker.

    Returns
    -------
    answered : in the order of the points
    seconds : the work took

    Raises
    ------
    UsageError
        If the worker runs another version of overlapsim. What goes wrong with a point is its row, not an error.
    """
    if task.version != __version__:
        raise UsageError(
            f"a worker runs overlapsim {__version__} and the sweep {task.version}; expected the same version on both"
        )
    began = time.perf_counter()
    machines: dict[tuple[str, int], tuple[Cluster, dict[object, object]]] = {}
    answered = tuple(_answer(task, id_, given, machines) for id_, given in task.points)
    return answered, time.perf_counter() - began


def _answer(
    task: Task,
    id_: str,
    given: Mapping[str, Any],
    machines: dict[tuple[str, int], tuple[Cluster, dict[object, object]]],
) -> Answered:
    try:
        place = (given["cluster"], given["nodes"])
        if place not in machines:
            machines[place] = (task.clusters[place[0]].with_nodes(place[1]), {})
        cluster, models = machines[place]
        kind = KINDS[task.command]
        cells = kind.answer(given, cluster, task.models.get(given.get("model", "")), models)
    except OverlapSimError as error:
        return Answered(id_, INFEASIBLE, one_line(str(error)), {})
    except Exception as error:
        # One point must not end a night's sweep; its row says what happened, and the summary counts it.
        return Answered(id_, FAILED, one_line(f"{type(error).__name__}: {error}"), {})
    return Answered(id_, OK, "", {column.name: column.cell(cells[column.name]) for column in kind.columns})


def one_line(text: str) -> str:
    r"""Text without line ends: a row is one line.

    Examples
    --------
    >>> one_line("it does not fit:\n  - 81 GB")
    'it does not fit: - 81 GB'
    """
    return " ".join(text.split())
