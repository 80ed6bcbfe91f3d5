"""What a parametric model leaves over, interpolated between measured points and faded outside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from overlapsim.jit import compiled

FloatArray = NDArray[np.float64]

NEIGHBOURS: Final = 6
# Added to distances, so that a measured point does not decide alone: single cells of tables are several times off.
NEAREST: Final = 0.3


@dataclass(frozen=True, eq=False)
class ResidualLayer:
    """Log ratios of measured over modelled time at measured points, looked up by the six nearest.

    Neighbours weigh ``1 / (distance + 0.3)^2``; beyond the box of measured
    sizes the correction fades as ``exp(-distance in octaves)``, since there
    it is a guess.

    Attributes
    ----------
    points : (N, D) coordinates in which distance is taken, sorted by the first
    residuals : (N,) natural logarithm of measured over modelled
    low, high : (B,) box of the measured sizes, in octaves (log2)
    """

    points: FloatArray
    residuals: FloatArray
    low: FloatArray
    high: FloatArray

    @classmethod
    def of(cls, points: FloatArray, residuals: FloatArray, octaves: FloatArray) -> Self:
        """Sort measured points into a layer.

        Parameters
        ----------
        points : (N, D), N >= 6
        residuals : (N,)
        octaves : (N, B) log2 of the sizes whose box counts as measured
        """
        assert len(points) >= NEIGHBOURS, f"{len(points)} points; a residual layer needs {NEIGHBOURS}"
        order = np.lexsort((*points.T[::-1][:-1], points[:, 0]))
        return cls(
            np.ascontiguousarray(points[order], dtype=np.float64),
            np.ascontiguousarray(residuals[order], dtype=np.float64),
            octaves.min(axis=0).astype(np.float64),
            octaves.max(axis=0).astype(np.float64),
        )

    def at(self, points: FloatArray, octaves: FloatArray) -> FloatArray:
        """Log ratios at (Q, D) points whose sizes are (Q, B) octaves.

        Examples
        --------
        >>> line = np.arange(6.0)[:, None]
        >>> layer = ResidualLayer.of(line, np.full(6, 0.1), line)
        >>> layer.at(np.array([[2.0], [6.0]]), np.array([[2.0], [6.0]])).round(4).tolist()
        [0.1, 0.0368]
        """
        found = np.empty(len(points))
        _many(
            np.ascontiguousarray(points, dtype=np.float64),
            np.ascontiguousarray(octaves, dtype=np.float64),
            self.points,
            self.residuals,
            self.low,
            self.high,
            found,
        )
        return found

    def at_one(self, point: FloatArray, octaves: FloatArray) -> float:
        """`at` for one point of shape (D,) and its (B,) octaves: a microsecond or two."""
        return float(_single(point, octaves, self.points, self.residuals, self.low, self.high))


@compiled
def _single(
    query: FloatArray, octaves: FloatArray, points: FloatArray, residuals: FloatArray, low: FloatArray, high: FloatArray
) -> float:
    near, values = np.empty(6), np.empty(6)
    return float(_one(query, points, residuals, near, values) * _fade(octaves, low, high))


@compiled
def _many(
    queries: FloatArray,
    octaves: FloatArray,
    points: FloatArray,
    residuals: FloatArray,
    low: FloatArray,
    high: FloatArray,
    found: FloatArray,
) -> None:
    near = np.empty(6)
    values = np.empty(6)
    for i in range(found.size):
        found[i] = _one(queries[i], points, residuals, near, values) * _fade(octaves[i], low, high)


@compiled
def _fade(octaves: FloatArray, low: FloatArray, high: FloatArray) -> float:
    beyond = 0.0
    for axis in range(low.size):
        outside = max(0.0, low[axis] - octaves[axis], octaves[axis] - high[axis])
        beyond += outside * outside
    return float(np.exp(-np.sqrt(beyond)))


@compiled
def _one(query: FloatArray, points: FloatArray, residuals: FloatArray, near: FloatArray, values: FloatArray) -> float:
    """Weighted mean of the nearest; the points' order along the first axis ends the search early."""
    near[:] = np.inf
    values[:] = 0.0
    up = np.searchsorted(points[:, 0], query[0])
    down = up - 1
    while True:
        rise = points[up, 0] - query[0] if up < residuals.size else np.inf
        fall = query[0] - points[down, 0] if down >= 0 else np.inf
        step = min(rise, fall)
        if step * step >= near[5]:
            break
        if fall <= rise:
            index = down
            down -= 1
        else:
            index = up
            up += 1
        distance = 0.0
        for axis in range(query.size):
            gap = points[index, axis] - query[axis]
            distance += gap * gap
        place = 5
        if distance >= near[place]:
            continue
        while place > 0 and near[place - 1] > distance:
            near[place], values[place] = near[place - 1], values[place - 1]
            place -= 1
        near[place], values[place] = distance, residuals[index]
    total = weights = 0.0
    for place in range(6):
        weight = 1.0 / (np.sqrt(near[place]) + 0.3) ** 2
        total += weight * values[place]
        weights += weight
    return total / weights
