"""How far a table itself is from smooth: the part of an error that no smooth model can avoid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

Shape = Mapping[str, float | str | bool]


def roughness(parts: Iterable[Sequence[tuple[Shape, float]]]) -> float:
    """Median distance of a time from the log-log line through its two neighbours, as a fraction.

    For each dimension in turn, rows that agree in all others form a cell; a row with a neighbour on either side in
    its cell counts once for each dimension where it has both.

    Parameters
    ----------
    parts : for each operator of the table its rows, as dimensions by name and a time > 0; numbers are scaled along,
        other values only tell cells apart, and operators are never neighbours of one another

    Returns
    -------
    float
        NaN where no row has two neighbours.

    Examples
    --------
    A straight power law is smooth; a spike of 20 % at the middle is 20 % rough:

    >>> roughness([[({"n": 1}, 1.0), ({"n": 2}, 2.0), ({"n": 4}, 4.0)]])
    0.0
    >>> round(roughness([[({"n": 1}, 1.0), ({"n": 2}, 2.4), ({"n": 4}, 4.0)]]), 3)
    0.2
    """
    distances: list[float] = []
    for part in parts:
        distances += _distances([shape for shape, _ in part], [time for _, time in part])
    return float(np.median(distances)) if distances else float("nan")


def _distances(shapes: Sequence[Shape], seconds: Sequence[float]) -> list[float]:
    distances: list[float] = []
    names = [name for name in (shapes[0] if shapes else {}) if _numeric(shapes, name)]
    for name in names:
        cells: dict[tuple[object, ...], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        for shape, time in zip(shapes, seconds, strict=True):
            rest = tuple(value for key, value in shape.items() if key != name)
            cells[rest][float(shape[name])].append(time)
        for cell in cells.values():
            x = np.log(np.array(sorted(cell)))
            y = np.log(np.array([float(np.median(cell[size])) for size in sorted(cell)]))
            if len(x) < 3:
                continue
            weight = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
            line = y[:-2] + weight * (y[2:] - y[:-2])
            distances += np.abs(np.expm1(y[1:-1] - line)).tolist()
    return distances


def _numeric(shapes: Sequence[Shape], name: str) -> bool:
    values = {shape.get(name) for shape in shapes}
    return len(values) > 2 and all(isinstance(value, int | float) and value > 0 for value in values)
