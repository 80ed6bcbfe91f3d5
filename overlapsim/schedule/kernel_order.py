"""A topological order in one compiled pass: what may come first comes first, ties by number."""

from __future__ import annotations

import numpy as np

from overlapsim.jit import compiled
from overlapsim.schedule.program import Int


@compiled
def topological_order(num_nodes: int, before: Int, after: Int) -> Int:
    """Nodes 0 .. num_nodes - 1 in an order that has ``before[i]`` ahead of ``after[i]``.

    Breadth first: nodes without predecessors by number, then each node as its
    last predecessor leaves.  Nodes on a cycle, and behind one, are left out,
    so a result shorter than `num_nodes` says that there is a cycle.

    Parameters
    ----------
    num_nodes : int
    before, after : int64 arrays of one shape, node numbers; an edge may be given more than once

    Examples
    --------
    >>> topological_order(3, np.array([2, 0]), np.array([0, 1])).tolist()
    [2, 0, 1]
    """
    ptr = np.zeros(num_nodes + 1, np.int64)
    waits = np.zeros(num_nodes, np.int64)
    for i in range(len(before)):
        ptr[before[i] + 1] += 1
        waits[after[i]] += 1
    for node in range(num_nodes):
        ptr[node + 1] += ptr[node]
    fill = ptr[:-1].copy()
    targets = np.empty(len(after), np.int64)
    for i in range(len(after)):
        targets[fill[before[i]]] = after[i]
        fill[before[i]] += 1
    order = np.empty(num_nodes, np.int64)
    found = 0
    for node in range(num_nodes):
        if waits[node] == 0:
            order[found] = node
            found += 1
    done = 0
    while done < found:
        node = order[done]
        done += 1
        for j in range(ptr[node], ptr[node + 1]):
            target = targets[j]
            waits[target] -= 1
            if waits[target] == 0:
                order[found] = target
                found += 1
    return order[:found]
