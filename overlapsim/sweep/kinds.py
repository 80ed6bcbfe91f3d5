"""The questions that a sweep can ask, by the name of the command that asks one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from overlapsim.hardware.profile import Cluster
from overlapsim.sweep import operators, plans, steps
from overlapsim.sweep.keys import Cell, Column, Key
from overlapsim.workload.model import ModelSpec

Answer = Callable[[Mapping[str, Any], Cluster, ModelSpec | None, dict[object, object]], Mapping[str, Cell]]


@dataclass(frozen=True)
class Kind:
    """One question.

    Attributes
    ----------
    name : of the command
    keys : what a point is given
    columns : what its answer fills
    answer : from values by key, the cluster with its nodes counted, the model where there is one, and results of cost
        models shared between points of that cluster, to cells by column
    """

    name: str
    keys: tuple[Key, ...]
    columns: tuple[Column, ...]
    answer: Answer

    @property
    def has_model(self) -> bool:
        """Whether points name a model."""
        return any(key.name == "model" for key in self.keys)

    @property
    def row_columns(self) -> tuple[Column, ...]:
        """Columns of the results: what became of the point, what it was given, where that is from, its answer."""
        digests = ("cluster_sha256", *(("model_sha256",) if self.has_model else ()), "overlapsim_version")
        given = {column.name for column in (*STATUS_COLUMNS, *(key.as_column for key in self.keys))}
        assert not given & {column.name for column in self.columns}, "an answer has a column of its point"
        return (
            *STATUS_COLUMNS,
            *(key.as_column for key in self.keys),
            *(Column(name, "text") for name in digests),
            *self.columns,
        )


STATUS_COLUMNS: Final = (Column("id", "text"), Column("status", "text"), Column("reason", "text"))
OK: Final = "ok"
INFEASIBLE: Final = "infeasible"
"""The point cannot be: a layout that does not divide or fit, more ranks than GPUs; the reason says what would do."""
FAILED: Final = "failed"
"""The point ended in a fault of this program, or took its process with it."""
KINDS: Final[Mapping[str, Kind]] = {
    "plan": Kind("plan", plans.KEYS, plans.COLUMNS, plans.answer),
    "simulate": Kind("simulate", steps.KEYS, steps.COLUMNS, steps.answer),
    "operator": Kind("operator", operators.KEYS, operators.COLUMNS, operators.answer),
}
