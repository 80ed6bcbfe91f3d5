"""A binary heap of events whose times can be changed; ties need no rule (docs/program.md section 3.2)."""

from __future__ import annotations

from overlapsim.engine import kernel_layout as at
from overlapsim.jit import borrowing, inlined
from overlapsim.schedule.program import Int


@borrowing
def _rise(heap: Int, place: int, event: int, time: int) -> None:
    while place > 0:
        parent = (place - 1) >> 1
        if heap[parent, at.AT] <= time:
            break
        heap[place, at.AT] = heap[parent, at.AT]
        heap[place, at.EVENT] = heap[parent, at.EVENT]
        heap[heap[place, at.EVENT], at.PLACE] = place
        place = parent
    heap[place, at.AT] = time
    heap[place, at.EVENT] = event
    heap[event, at.PLACE] = place


@borrowing
def _sink(heap: Int, size: int, place: int, event: int, time: int) -> None:
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1, at.AT] < heap[child, at.AT]:
            child += 1
        if heap[child, at.AT] >= time:
            break
        heap[place, at.AT] = heap[child, at.AT]
        heap[place, at.EVENT] = heap[child, at.EVENT]
        heap[heap[place, at.EVENT], at.PLACE] = place
        place = child
    heap[place, at.AT] = time
    heap[place, at.EVENT] = event
    heap[event, at.PLACE] = place


@inlined
def schedule(heap: Int, var: Int, event: int, time: int) -> None:
    """Put `event` at `time`, wherever it was before."""
    place = heap[event, at.PLACE]
    if place == at.NEVER:
        place = var[at.HEAP_SIZE]
        var[at.HEAP_SIZE] = place + 1
        _rise(heap, place, event, time)
    elif time < heap[place, at.AT]:
        _rise(heap, place, event, time)
    elif time > heap[place, at.AT]:
        _sink(heap, var[at.HEAP_SIZE], place, event, time)


@borrowing
def pop(heap: Int, var: Int) -> int:
    """Remove and return an event of least time."""
    event = heap[0, at.EVENT]
    gap = heap[event, at.PLACE]
    heap[event, at.PLACE] = at.NEVER
    size = var[at.HEAP_SIZE] - 1
    var[at.HEAP_SIZE] = size
    if size > 0:
        _sink(heap, size, gap, heap[size, at.EVENT], heap[size, at.AT])
    return int(event)
