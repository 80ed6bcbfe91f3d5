"""Stable orders of positions by integer keys, in time linear in their number: what the packer sorts with."""

from __future__ import annotations

import numpy as np

from overlapsim.jit import borrowing, compiled
from overlapsim.schedule.program import Int

SHORT = 24
"""Rows up to this length are sorted by insertion, longer ones by a heap."""


@compiled
def dense(values: Int) -> tuple[Int, int]:
    """Number the distinct values 0, 1, ... by rising value; return the number of each entry and the count."""
    number = np.empty(len(values), np.int64)
    if len(values) == 0:
        return number, 0
    low, count = values.min(), 0
    span = values.max() - low
    if 0 <= span <= 4 * len(values):  # below 0: the difference does not fit
        seen = np.zeros(span + 1, np.int64)
        for i in range(len(values)):
            seen[values[i] - low] = 1
        for v in range(span + 1):
            if seen[v] == 1:
                seen[v] = count
                count += 1
        for i in range(len(values)):
            number[i] = seen[values[i] - low]
        return number, count
    order = np.arange(len(values))
    sort(order, values, 0, len(order))
    for place in range(len(values)):
        if place > 0 and values[order[place]] != values[order[place - 1]]:
            count += 1
        number[order[place]] = count
    return number, count + 1


@compiled
def grouped(key: Int, num_rows: int, before: Int) -> tuple[Int, Int]:
    """Return `ptr` and `index`: the positions with key i, as they follow in `before`, are index[ptr[i]:ptr[i + 1]]."""
    ptr, index = np.zeros(num_rows + 1, np.int64), np.empty(len(before), np.int64)
    # Row i is counted at i + 1 and begins where the rows before it end; filling it moves its begin to its end.
    for j in before:
        ptr[key[j] + 1] += 1
    for i in range(num_rows):
        ptr[i + 1] += ptr[i]
    for j in before:
        index[ptr[key[j]]] = j
        ptr[key[j]] += 1
    for i in range(num_rows, 0, -1):
        ptr[i] = ptr[i - 1]
    ptr[0] = 0
    return ptr, index


@compiled
def grouped_and_sorted(key: Int, num_rows: int, value: Int) -> tuple[Int, Int]:
    """Like :func:`grouped`, each row by rising `value`; equal values stay in order of position."""
    ptr, index = grouped(key, num_rows, np.arange(len(key)))
    for i in range(num_rows):
        sort(index, value, ptr[i], ptr[i + 1])
    return ptr, index


@borrowing
def sort(index: Int, value: Int, first: int, end: int) -> None:
    """Sort index[first:end] by rising `value` of what is listed, then by rising number."""
    place = first + 1
    while place < end and _precedes(value, index[place - 1], index[place]):
        place += 1
    if place >= end:
        return  # as edges are nearly always added
    if end - first <= SHORT:
        for place in range(first + 1, end):
            j = index[place]
            while place > first and _precedes(value, j, index[place - 1]):
                index[place] = index[place - 1]
                place -= 1
            index[place] = j
        return
    for root in range((end - first) // 2 - 1, -1, -1):
        _sift(index, value, first, end, root)
    for last in range(end - 1, first, -1):
        index[first], index[last] = index[last], index[first]
        _sift(index, value, first, last, 0)


@borrowing
def _sift(index: Int, value: Int, first: int, end: int, root: int) -> None:
    """Let an entry of the heap in index[first:end], greatest on top, sink to its place."""
    j = index[first + root]
    child = 2 * root + 1
    while first + child < end:
        if first + child + 1 < end and _precedes(value, index[first + child], index[first + child + 1]):
            child += 1
        if not _precedes(value, j, index[first + child]):
            break
        index[first + root] = index[first + child]
        root, child = child, 2 * child + 1
    index[first + root] = j


@borrowing
def _precedes(value: Int, a: int, b: int) -> bool:
    return value[a] < value[b] or (value[a] == value[b] and a < b)
