"""Columns of the compiled engine's tables; everything but rates is int64, times are picoseconds.

Each table is a matrix with one row per thing.  Constants and state of a
thing share its row: a run starts from a copy of the whole table, and what
is read together lies together.  Chains (lists linked through a column) end
with NEVER.
"""

from __future__ import annotations

from typing import Final

NEVER: Final = -1  # no instant, no task, no row
LOOSE: Final = -2  # in no chain
MIN_SPEED: Final = 2.0**-16

# task, in the order of its life; constants are in the state they have before t = 0
LANE_NEXT: Final = 0  # next task of the host lane
RUNNER: Final = 1  # NEVER = HOST
HOST_TIME: Final = 2  # launch_ps; unit_ps of a HOST task
BLOCKERS: Final = 3  # what keeps it from being eligible: issue, queue, stream and closed -1 edges
TASK_NEXT: Final = 4  # chain of the tasks to make eligible, later of its line
LINE: Final = 5  # the line of contenders it joins (one per pool and priority); NEVER = takes no SMs
QUEUE_NEXT: Final = 6  # next task of the hardware queue
POOL: Final = 7  # HOST: its lane
CTAS: Final = 8  # CTAs to place: units, or the workers of a persistent kernel; 0 = FLOW
PLACED: Final = 9
SM: Final = 10
HELD: Final = 11
QUANTUM: Final = 12
OPEN_TO: Final = 13  # units below this may start
UNITS: Final = 14
PROGRESS: Final = 15
OUT: Final = 16  # outgoing edges that progress has not reached are OUT .. OUT_END - 1
OUT_END: Final = 17
STREAM_NEXT: Final = 18  # next task of the stream
MEMBER_NEXT: Final = 19  # chain of the members of a group
GATE: Final = 20  # first closed gate
GATE_END: Final = 21
ISSUED: Final = 22  # the five instants, in the order of Timeline
ELIGIBLE: Final = 23
RESIDENT: Final = 24
START: Final = 25
END: Final = 26
TASK_COLUMNS: Final = 27

# runner (a BLOCKS task or a group, by rising lowest member): constants ...
LEAD: Final = 0  # lowest member
MEMBERS: Final = 1  # of a group; 0 = BLOCKS
WORKERS: Final = 2  # of a persistent kernel, else 0
UNIT_TIME: Final = 3  # unit_ps or chunk time
ASK: Final = 4  # its demands are rows ASK .. ASK_END - 1
ASK_END: Final = 5
SHARES: Final = 6  # 1 = its speed, or another's, depends on whether it runs
# ... and state
HEAD: Final = 7  # cohorts in order of start (persistent: crews in order of worker)
TAIL: Final = 8
RUNNING: Final = 9  # units running
STARTED: Final = 10  # units started (persistent: unused)
RESIDENTS: Final = 11  # members that are resident
RUNNER_NEXT: Final = 12  # chain of the runners to look at in steps 3 and 4
RAN: Final = 13  # RUNNING when speeds were last set
RUNNER_COLUMNS: Final = 14

# rate (float64), one row per runner
WEIGHT: Final = 0
DERATE: Final = 1  # of its pool; 1.0 for groups
SPEED: Final = 2
NEW_SPEED: Final = 3  # < 0 = open
CAP: Final = 4
BOUND: Final = 5  # cap / weight
RATE_COLUMNS: Final = 6

# demand (float64), one row per runner and finite resource
FULL: Final = 0
ASKED: Final = 1  # ask[k, r] for the units that run
DEMAND_COLUMNS: Final = 2

# ask, one row per row of demand
RESOURCE: Final = 0
ASKER: Final = 1  # the runner
NEXT_ASK: Final = 2  # chain of the active users of the resource, by rising runner
ASK_COLUMNS: Final = 3

# resource (float64)
CAPACITY: Final = 0
LOAD: Final = 1
LAM: Final = 2
RESOURCE_COLUMNS: Final = 3

# usage, one row per row of resource
FIRST_ASK: Final = 0
LAST_ASK: Final = 1
STATE: Final = 2
SEEN: Final = 3  # number of the sharing for which this row holds
USAGE_COLUMNS: Final = 4
AMPLE: Final = 0  # states
SCARCE: Final = 1
STALE: Final = 2  # scarce, and a user settled since lam was computed

# edge, by source and rising src_units
SRC_UNITS: Final = 0
LAG: Final = 1
DST: Final = 2
DST_GATE: Final = 3  # its row in the gate table; NEVER = stream wait
EDGE_COLUMNS: Final = 4

# gate, by destination and rising dst_unit
UNIT: Final = 0
OPEN: Final = 1
GATE_COLUMNS: Final = 2

# pool
FREE: Final = 0
FIRST_LINE: Final = 1  # its lines are FIRST_LINE .. LAST_LINE - 1, highest priority first
LAST_LINE: Final = 2
MOVING: Final = 3  # moving FLOWs that take SMs here
POOL_NEXT: Final = 4  # chain of the pools to grant
POOL_COLUMNS: Final = 5

# line: its tasks, in the order in which they became eligible
FIRST: Final = 0
LAST: Final = 1

# cohort: units (persistent: CTAs) that started together
NEXT: Final = 0
SIZE: Final = 1
BEGAN: Final = 2
SINCE: Final = 3  # when its remaining work was last counted; NEVER = no speed yet
DONE_AT: Final = 4  # NEVER = a crew that spins at a closed gate
WORKER: Final = 5  # persistent: first CTA of the crew
ROUND: Final = 6  # persistent: it does unit WORKER + ROUND * workers and its neighbours
COHORT_COLUMNS: Final = 7

# heap; events are numbered: runners, lanes, edges
AT: Final = 0
EVENT: Final = 1
PLACE: Final = 2  # where the event with this row's number is; NEVER = not scheduled
HEAP_COLUMNS: Final = 3

# var: the variables of the run
NOW: Final = 0
HEAP_SIZE: Final = 1
LANE_EVENT: Final = 2  # number of the first lane's event
EDGE_EVENT: Final = 3
TODO: Final = 4  # heads of chains
TOUCHED: Final = 5
STIRRED: Final = 6
FREE_SLOT: Final = 7  # chain of cohort rows given back
SLOTS_USED: Final = 8
NUM_FRESH: Final = 9  # lengths of lists
NUM_ACTIVE: Final = 10
NUM_OPEN: Final = 11
NUM_SCARCE: Final = 12
NUM_SHARINGS: Final = 13
COHORT_ROWS: Final = 14  # rows recorded, or counted where there was no room
SPEED_ROWS: Final = 15
NUM_VARS: Final = 16
