"""Edits that break rules of docs/program.md section 3 in the compiled engine, and its own short cuts of section 4.

What no program can show is left out, as in mutations_reference.py.
"""

from __future__ import annotations

from tests.engine.mutants import Mutation

_SETTLE = (
    ("3.1 a launch keeps the lane busy", "!= at.NEVER and task[i, at.HOST_TIME] > 0:", "!= at.NEVER and False:"),
    (
        "3.1 a HOST task takes its time",
        "var[at.NOW] + task[i, at.HOST_TIME])\n        return",
        "var[at.NOW])\n        return",
    ),
    ("3.1 a HOST task blocks its lane", "if task[i, at.RUNNER] == at.NEVER:\n            break", "pass"),
    (
        "3.1 a queue serves its head",
        "    if task[i, at.QUEUE_NEXT] != at.NEVER:\n        _unblock(task, var, task[i, at.QUEUE_NEXT])",
        "    pass",
    ),
    (
        "3.1 a stream waits for the end",
        "if done == task[i, at.UNITS]:\n        task[i, at.END] = var[at.NOW]\n        if",
        "if done == task[i, at.UNITS]:\n        task[i, at.END] = var[at.NOW]\n    if done == 1:\n        if",
    ),
    (
        "3.1 a FLOW without SMs is resident when eligible",
        "task[i, at.RESIDENT] = var[at.NOW]\n        runner[k, at.RESIDENTS]",
        "task[i, at.RESIDENT] = task[i, at.ISSUED]\n        runner[k, at.RESIDENTS]",
    ),
    (
        "3.2 settle all that ends at t",
        "if var[at.HEAP_SIZE] == 0 or heap[0, at.AT] != var[at.NOW]:",
        "if var[at.HEAP_SIZE] == 0 or heap[0, at.AT] != var[at.NOW] or var[at.STIRRED] != at.NEVER:",
    ),
    ("1 an edge opens at src_units", "edge[e, at.SRC_UNITS] <= done:", "edge[e, at.SRC_UNITS] < done:"),
    ("1 an edge opens after its lag", "var[at.NOW] + edge[e, at.LAG])", "var[at.NOW] + edge[e, at.LAG] // 2 + 1)"),
    ("3.4 gates of one unit open one by one", "and gate[first, at.OPEN] == 1:", "and first == g:"),
    ("3.4 the gate that opens last opens the rest", "if g == first:", "if g == first and gate[g, at.UNIT] == 0:"),
    (
        "3.4 gates close units",
        "task[i, at.OPEN_TO] = gate[first, at.UNIT] if first < end",
        "task[i, at.OPEN_TO] = task[i, at.UNITS] if first < end",
    ),
    (
        "3.3 a FLOW frees its SMs",
        "pool[task[i, at.POOL], at.FREE] += task[i, at.HELD]",
        "pool[task[i, at.POOL], at.FREE] += 1",
    ),
    (
        "3.3 a FLOW holds its SMs until it ends",
        "if done == task[i, at.UNITS] and task[i, at.HELD] > 0:",
        "if task[i, at.HELD] > 0:",
    ),
    ("3.3 units w, w + W, w + 2W, ...", "cohort[slot, at.ROUND] += 1", "cohort[slot, at.ROUND] += 2"),
    (
        "3.3 only workers in front have a last unit",
        "left = min(size, max(0, units - (cohort[slot, at.WORKER] + cohort[slot, at.ROUND] * workers)))",
        "left = size if units > cohort[slot, at.WORKER] + cohort[slot, at.ROUND] * workers else 0",
    ),
    ("3.3 retired CTAs free their SMs", "retired += size - left", "retired += min(1, size - left)"),
    (
        "3.4 progress is the prefix, not the count",
        "retired = _retire_workers(task, runner, cohort, var, cohort_rows, k)\n"
        "        done = _finished_prefix(task, runner, cohort, k)",
        "before = runner[k, at.RUNNING]\n"
        "        retired = _retire_workers(task, runner, cohort, var, cohort_rows, k)\n"
        "        done = task[i, at.PROGRESS] + before - runner[k, at.RUNNING]",
    ),
    (
        "3.4 the prefix ends at a CTA not placed",
        "first = task[i, at.PLACED] if task[i, at.PLACED] < task[i, at.CTAS] else task[i, at.UNITS]",
        "first = task[i, at.UNITS]",
    ),
    (
        "3.4 the prefix ends at the slowest crew",
        "first = min(first, cohort[slot, at.WORKER] + cohort[slot, at.ROUND] * workers)",
        "first = min(first, cohort[slot, at.WORKER] + cohort[runner[k, at.HEAD], at.ROUND] * workers)",
    ),
)

_GRANT = (
    ("3.3 then index", "_sort(fresh, var[at.NUM_FRESH])", "pass"),
    (
        "3.3 then time eligible",
        "task[i, at.TASK_NEXT] = at.NEVER\n",
        "task[i, at.TASK_NEXT] = line[n, at.FIRST]\n        line[n, at.FIRST] = i\n        continue\n",
    ),
    ("3.3 a FLOW takes all its SMs at once", "if free < got:", "if free < 1:"),
    ("3.3 a FLOW short of SMs closes the pool", "pool[p, at.FREE] = free\n                return", "break"),
    ("3.3 BLOCKS hold at most sm", "min(free, task[i, at.SM] - task[i, at.HELD], want)", "min(free, want)"),
    ("3.3 clusters", "got -= got % task[i, at.QUANTUM]", "pass"),
    ("3.3 the last CTAs need no full cluster", "if got < want:", "if True:"),
    ("3.1 BLOCKS are resident at their first SM", "if task[i, at.RESIDENT] == at.NEVER:", "if True:"),
    (
        "3.4 chunk 0 waits for all members",
        "runner[k, at.RESIDENTS] < runner[k, at.MEMBERS]",
        "runner[k, at.RESIDENTS] < 1",
    ),
    (
        "3.4 gates of all members",
        "or all units done\n        i = task[i, at.MEMBER_NEXT]",
        "or all units done\n        i = at.NEVER",
    ),
    (
        "3.4 chunk u + 1 waits for gates",
        "if task[i, at.OPEN_TO] <= unit:",
        "if task[i, at.OPEN_TO] <= min(unit, 0) or unit == task[i, at.UNITS]:",
    ),
    ("3.4 units of BLOCKS wait for gates", "min(task[i, at.PLACED], task[i, at.OPEN_TO])", "task[i, at.PLACED]"),
    ("3.4 crews start as far as gates are open", "_split_crew(runner, cohort, var, k, slot, ready)", "pass"),
    (
        "3.1 start is the first unit",
        "at.START] == at.NEVER:\n            task[i, at.START] = var[at.NOW]",
        "at.START] == at.NEVER:\n            task[i, at.START] = task[i, at.RESIDENT]",
    ),
    (
        "4 crews merge only in one round",
        "        and cohort[after, at.ROUND] == cohort[slot, at.ROUND]\n",
        "",
    ),
)

_SHARE = (
    ("3.5 F counts units", "many = float(runner[k, at.RUNNING])", "many = 1.0"),
    (
        "3.5 ask is at most C",
        "min(many * demand[d, at.FULL], resource[r, at.CAPACITY])",
        "many * demand[d, at.FULL]",
    ),
    ("3.5 overload counts caps", "+= demand[d, at.ASKED] * cap", "+= demand[d, at.ASKED]"),
    (
        "3.5 overload is above C",
        "resource[r, at.LOAD] > resource[r, at.CAPACITY]",
        "resource[r, at.LOAD] >= resource[r, at.CAPACITY]",
    ),
    ("3.5 derate while a FLOW moves", "at.MOVING] > 0:", "at.MOVING] >= 0:"),
    (
        "3.5 fixed counts what the settled use",
        "fixed += demand[d, at.ASKED] * rate[k, at.NEW_SPEED]",
        "fixed += demand[d, at.ASKED]",
    ),
    ("3.5 slope counts weights", "slope += demand[d, at.ASKED] * rate[k, at.WEIGHT]", "slope += demand[d, at.ASKED]"),
    ("3.5 fixed is left out of C", "resource[r, at.CAPACITY] - fixed)", "resource[r, at.CAPACITY])"),
    ("3.5 the least lam decides", "least = min(least, resource[r, at.LAM])", "least = resource[r, at.LAM]"),
    ("3.5 cap / weight equal to lam settles at cap", "rate[k, at.BOUND] <= lam:", "rate[k, at.BOUND] < lam:"),
    (
        "3.5 cap is divided by weight",
        "rate[k, at.BOUND] <= lam:",
        "rate[k, at.CAP] <= lam * rate[k, at.WEIGHT]:",
    ),
    (
        "3.5 those that reach their cap settle first",
        "if bound <= lam:",
        "if False:",
    ),
    ("4 the least cap / weight spares a look at the others", "if bound <= lam:", "if bound < lam:"),
    (
        "3.5 all equal lam settle at once",
        "if resource[scarce[s], at.LAM] == lam:",
        "if s == min(q for q in range(var[at.NUM_SCARCE]) if resource[scarce[q], at.LAM] == lam):",
    ),
    ("3.5 x is at least 2^-16", "max(at.MIN_SPEED, lam * rate[k, at.WEIGHT])", "lam * rate[k, at.WEIGHT]"),
    ("3.5 x = lam * weight", "max(at.MIN_SPEED, lam * rate[k, at.WEIGHT])", "max(at.MIN_SPEED, lam)"),
    (
        "4 all sums of a runner that settles go stale",
        "if usage[r, at.STATE] == at.SCARCE:",
        "if usage[r, at.STATE] == at.SCARCE and d == runner[k, at.ASK]:",
    ),
)

_SPEEDS = (
    (
        "3.5 runners rise by index",
        "while place > 0 and active[place - 1] > k:",
        "while place > 0 and active[place - 1] < k:",
    ),
    ("3.5 derate by FLOWs with SMs only", "if task[i, at.SM] > 0:", "if True:"),
    (
        "3.5 a group that ends its chunk moves no more",
        "+= 2 * runner[k, at.RUNNING] - 1",
        "+= runner[k, at.RUNNING]",
    ),
    ("3.6 an end is rounded up", "math.ceil(left / speed)", "int(left / speed)"),
    ("3.6 an end is at least 1 ps away", "max(1, math.ceil(left / speed))", "math.ceil(left / speed)"),
    ("3.6 what was done went at the old speed", "left[slot] - old * float(", "left[slot] - new * float("),
    (
        "3.6 remaining counts from the last change",
        "cohort[slot, at.SINCE] = var[at.NOW]\n            cohort[slot, at.DONE_AT] = _end(var, left[slot], new)",
        "cohort[slot, at.DONE_AT] = _end(var, left[slot], new)",
    ),
    ("3.6 an equal speed touches nothing", "if rate[k, at.NEW_SPEED] != rate[k, at.SPEED]:", "if True:"),
    ("3.2 a runner that starts anew has no old speed", "rate[k, at.SPEED] = 0.0", "pass"),
    (
        "4 crews of a persistent kernel end apart",
        "if first == at.NEVER or (other != at.NEVER and other < first):",
        "if first == at.NEVER:",
    ),
    (
        "4 a changed end is moved in the heap",
        "if runner[k, at.RUNNER_NEXT] == at.LOOSE:\n        schedule",
        "if False:\n        schedule",
    ),
)

_PACK = (
    (
        "3.5 full = demand * 1e12 / T",
        "demand_amount[j] * 1e12 / float(runner[k, at.UNIT_TIME])",
        "demand_amount[j] / float(runner[k, at.UNIT_TIME]) * 1e12",
    ),
    ("3.5 full is per chunk time", "/ float(runner[k, at.UNIT_TIME])", "/ float(unit_ps[i])"),
    (
        "3.4 the largest unit_ps sets the pace",
        "max(runner[k, at.UNIT_TIME], unit_ps[i])",
        "min(runner[k, at.UNIT_TIME] or unit_ps[i], unit_ps[i])",
    ),
    ("3.3 persistent CTAs stay", "= min(sm[i], units[i]) if persistent[i] else 0", "= 0"),
    ("3.3 priority", "= num_ranks - 1 - rank[stream[i]]", "= rank[stream[i]]"),
    (
        "3.1 -1 edges hold a task back",
        "            first += 1\n            task[i, at.BLOCKERS] += 1",
        "            task[i, at.BLOCKERS] += 1 if first == entering_ptr[i] else 0\n            first += 1",
    ),
    (
        "3.1 a task waits for the one before it in its stream",
        "task[before, at.STREAM_NEXT] = i\n            task[i, at.BLOCKERS] += 1",
        "pass",
    ),
    (
        "3.1 a task waits for the one before it in its queue",
        "task[before, at.QUEUE_NEXT] = i\n            task[i, at.BLOCKERS] += 1",
        "pass",
    ),
    (
        "3.5 derate caps BLOCKS only",
        "pool_derate[pool_of[i]] if kind[i] == BLOCKS else 1.0",
        "pool_derate[pool_of[i]]",
    ),
    (
        "4 a derating group shares, whatever it demands",
        "runner[k, at.SHARES] = 1  # its moving",
        "pass  # its moving",
    ),
    (
        "3.5 a group counts as its lowest member",
        "runner[k, at.MEMBERS] += 1",
        "runner[k, at.MEMBERS] += 1\n            runner[k, at.LEAD] = i",
    ),
)

_ORDER = (
    ("1 progress opens edges by rising src_units", "return value[a] < value[b] or", "return value[a] > value[b] or"),
)

MUTATIONS = (
    *(Mutation(rule, "kernel_settle.py", old, new) for rule, old, new in _SETTLE),
    *(Mutation(rule, "kernel_grant.py", old, new) for rule, old, new in _GRANT),
    *(Mutation(rule, "kernel_share.py", old, new) for rule, old, new in _SHARE),
    *(Mutation(rule, "kernel_speeds.py", old, new) for rule, old, new in _SPEEDS),
    *(Mutation(rule, "kernel_pack.py", old, new) for rule, old, new in _PACK),
    *(Mutation(rule, "kernel_order.py", old, new) for rule, old, new in _ORDER),
    Mutation(
        "3.5 contention off", "compiled.py", "contention = contention and tables.shares", "contention = tables.shares"
    ),
)
