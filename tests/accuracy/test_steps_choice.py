"""Regret of choices by closed form."""

from __future__ import annotations

import pytest

from overlapsim.accuracy.steps_choice import choice_notes, choices
from overlapsim.accuracy.steps_scoring import Timed


def menu(name: object, *times: tuple[float, float]) -> list[Timed]:
    """Rows of measured and predicted times."""
    return [Timed(name, measured, predicted) for measured, predicted in times]


GOOD = menu("good", (1.0, 1.0), (1.2, 2.0), (1.4, 3.0), (2.0, 4.0))
BAD = menu("bad", (1.0, 9.0), (1.5, 1.0), (1.2, 2.0), (1.1, 3.0))


def test_the_right_order_has_no_regret() -> None:
    """Whatever the times themselves are."""
    found = choices(GOOD)
    assert (found.num_groups, found.mean_regret, found.worst_regret, found.share_near) == (1, 0.0, 0.0, 1.0)


def test_regret_is_of_the_first_and_of_the_best_of_three() -> None:
    """The first predicted is half slower; of the first three the best is a tenth slower, so none is near."""
    found = choices(BAD)
    assert found.mean_regret == pytest.approx(0.5)
    assert found.mean_of_tried == pytest.approx(0.1)
    assert found.share_near == 0.0


def test_groups_count_alike_and_small_ones_not() -> None:
    """The mean is over groups; two layouts are no choice."""
    found = choices([*GOOD, *BAD, *menu("small", (1.0, 2.0), (2.0, 1.0))])
    assert found.num_groups == 2
    assert found.mean_regret == pytest.approx(0.25)
    assert found.worst_regret == pytest.approx(0.5)
    assert found.share_near == 0.5


def test_tables_are_printed_apart_and_together() -> None:
    """Menus of the same name in two tables stay apart."""
    notes = choice_notes({"a": GOOD, "b": [Timed("good", row.measured_s, row.predicted_s) for row in BAD]})
    assert [name.partition(":")[0] for name in notes] == ["a", "b", "pooled"]
    assert "25.0 % above the fastest" in notes["pooled: layout chosen by prediction"]
    assert "2 groups" in notes["pooled: layout chosen by prediction"]
    assert "no group" in str(choices(GOOD[:2]))
