"""One edit per rule of docs/program.md section 3, for the readable engine: (rule, file, text, text that breaks it).

Not here, because no program can show them: `max(0.0, remaining - ...)`: a unit whose scheduled end is
still ahead has remaining / x > elapsed, so x * elapsed, rounded, is at most remaining.  `max(0, C - fixed)`:
a negative lam gives the floor of 2^-16, and so does 0.  `C = inf` left out: an infinite sum is not overloaded.
"""

from __future__ import annotations

from tests.engine.mutants import Mutation

_LIFE = (
    ("3.1 a launch keeps the lane busy", "timeout(task.launch_ps)", "timeout(0)"),
    (
        "3.1 a HOST task waits for its edges",
        "for edge in task.waits:\n                    yield edge.opened",
        "pass",
    ),
    ("3.1 a HOST task takes its time", "timeout(task.unit_ps)", "timeout(0)"),
    (
        "3.1 a HOST task blocks its lane",
        "yield self.env.timeout(task.unit_ps)\n                self.finish_unit(task, 0, task.t_start)",
        "self.env.timeout(task.unit_ps).callbacks.append(lambda _, t=task: self.finish_unit(t, 0, t.t_start))",
    ),
    ("3.1 a queue serves its head", '(p.queue_tasks, "left_queue")', '(p.stream_tasks, "ended")'),
    ("3.1 the head leaves when eligible", '(p.queue_tasks, "left_queue")', '(p.queue_tasks, "resident")'),
    ("3.1 a stream runs one task after another", '(p.stream_tasks, "ended")', '(p.queue_tasks, "left_queue")'),
    ("3.1 a stream waits for the end", '(p.stream_tasks, "ended")', '(p.stream_tasks, "resident")'),
    (
        "3.1 -1 edges hold a task back",
        "for edge in task.waits:\n            yield edge.opened",
        "pass",
    ),
    (
        "3.1 all -1 edges hold a task back",
        "for edge in task.waits:\n            yield edge.opened",
        "for edge in task.waits[:1]:\n            yield edge.opened",
    ),
    (
        "3.1 a FLOW without SMs is resident when eligible",
        "if task.kind == FLOW and task.sm == 0:\n            self.make_resident(task)\n        else:",
        "if True:",
    ),
    ("3.1 BLOCKS are resident at their first SM", "if count and task.t_resident < 0:", "if count == want:"),
    (
        "3.1 start is the first unit",
        "task.t_start = self.env.now\n        runner.running",
        "task.t_start = task.t_resident\n        runner.running",
    ),
    ("3.1 end is the last unit", "if task.progress == task.units:", "if u == task.units - 1:"),
)

_INSTANT = (
    ("3.2 settle before granting", "GRANT: Final = 2", "GRANT: Final = 0"),
    ("3.2 grant and start before speeds", "SPEEDS: Final = 3", "SPEEDS: Final = 1"),
)

_SMS = (
    ("3.3 priority", "(-task.priority, task.t_eligible", "(0, task.t_eligible"),
    ("3.3 higher priority first", "(-task.priority, task.t_eligible", "(task.priority, task.t_eligible"),
    ("3.3 then time eligible", "task.t_eligible, task.index, task)", "0, task.index, task)"),
    ("3.3 then index", "task.t_eligible, task.index, task)", "task.t_eligible, -task.index, task)"),
    ("3.3 a FLOW takes all its SMs at once", "if task.sm > pool.free:", "if not pool.free:"),
    ("3.3 a FLOW short of SMs closes the pool", "break  # takes none", "continue  # takes none"),
    (
        "3.3 only its own pool, for this instant",
        "break  # takes none and closes the pool for this instant",
        "return  # takes none and closes all",
    ),
    (
        "3.3 a FLOW holds its SMs until it ends",
        "yield task.resident\n",
        "yield task.resident\n            self.release(task, task.sm)\n            task.sm = 0\n",
    ),
    ("3.3 a FLOW frees its SMs", "self.release(task, task.sm)", "self.release(task, 0)"),
    ("3.3 BLOCKS hold at most sm", "min(pool.free, task.sm - task.held_sm, want)", "min(pool.free, want)"),
    ("3.3 clusters", "if count < want:\n                        count -= count % task.sm_quantum", "pass"),
    ("3.3 the last CTAs need no full cluster", "if count < want:\n", "if True:\n"),
    ("3.3 nothing free, no kernel behind", "count = min(pool.free,", "count = min(pool.free or 1,"),
    (
        "3.3 a CTA retires with its unit",
        "np.where(p.persistent, np.minimum(p.sm, p.units), p.units)",
        "np.minimum(p.sm, p.units)",
    ),
    ("3.3 persistent CTAs stay", "np.where(p.persistent, np.minimum(p.sm, p.units), p.units)", "p.units"),
    ("3.3 W = min(sm, units)", "np.minimum(p.sm, p.units)", "p.sm"),
    (
        "3.3 units w, w + W, w + 2W, ...",
        "range(w, task.units, task.num_ctas):",
        "range(w * -(-task.units // task.num_ctas), min(task.units, (w + 1) * -(-task.units // task.num_ctas))):",
    ),
    (
        "3.3 a late CTA has its share",
        "range(w, task.units, task.num_ctas):",
        "range(w, task.units, task.sm - task.held_sm + task.num_ctas):",
    ),
)

_UNITS = (
    ("3.4 gates close units", "yield gate.opened\n", "yield self.env.timeout(0)\n"),
    ("3.4 a gate closes its own unit", "task.gates[-1].dst_unit <= u:", "task.gates[-1].dst_unit < u:"),
    ("3.4 a gate closes later units too", "task.gates[-1].dst_unit <= u:", "task.gates[-1].dst_unit == u:"),
    (
        "3.4 chunk 0 waits for all members",
        "for task in members:\n            yield task.resident",
        "for task in members[:1]:\n            yield task.resident",
    ),
    (
        "3.4 gates of all members",
        "for task in members:\n                yield from self.spin",
        "for task in members[:1]:\n                yield from self.spin",
    ),
    (
        "3.4 chunk u + 1 waits for gates",
        "for task in members:\n                yield from self.spin(task, u)",
        "for task in members:\n                yield from self.spin(task, 0)",
    ),
    (
        "3.4 the largest unit_ps sets the pace",
        "max(task.unit_ps for task in members)",
        "min(task.unit_ps for task in members)",
    ),
    (
        "3.4 progress is the prefix, not the count",
        "while task.progress in task.finished_ahead:\n            task.finished_ahead.remove(task.progress)",
        "if True:",
    ),
    (
        "3.4 progress is the whole prefix",
        "while task.progress in task.finished_ahead:",
        "if task.progress in task.finished_ahead:",
    ),
    (
        "3.4 members progress together",
        "self.finish_unit(task, u, started)\n        for task",
        "self.finish_unit(task, u if task is members[0] else members[0].units - 1 - u, started)\n        for task",
    ),
    (
        "1 an edge opens at src_units",
        "task.out[-1].src_units <= task.progress:",
        "task.out[-1].src_units < task.progress:",
    ),
    ("1 an edge opens after its lag", "self.env.timeout(edge.lag_ps)", "self.env.timeout(0)"),
    (
        "1 the lag counts from the end of the prefix",
        "self.env.timeout(edge.lag_ps)",
        "self.env.timeout(max(0, edge.lag_ps - (self.env.now - started)))",
    ),
)

_SPEEDS = (
    ("3.5 contention off", "program if contention else program.without_contention()", "program"),
    ("3.5 F counts units", "min(runner.running * full,", "min(full,"),
    (
        "3.5 spinning units do not count",
        "min(runner.running * full,",
        "min((runner.running if first.kind == FLOW else first.held_sm) * full,",
    ),
    ("3.5 ask is at most C", "min(runner.running * full, self.capacity[r])", "runner.running * full"),
    ("3.5 full is per chunk time", "/ float(unit_ps)", "/ float(task.unit_ps)"),
    ("3.5 full = demand * 1e12 / T", "amount * 1e12 / float(unit_ps)", "amount / float(unit_ps) * 1e12"),
    ("3.5 full is summed over members", "full.get(resource, 0.0) + amount", "amount"),
    (
        "3.5 members are summed in order",
        "full: dict[int, float] = {}\n        for task in members:",
        "full: dict[int, float] = {}\n        for task in reversed(members):",
    ),
    ("3.5 runners rise by index", "key=lambda runner: runner.index)", "key=lambda runner: -runner.index)"),
    ("3.5 a group counts as its lowest member", "_Runner(members[0].index,", "_Runner(members[-1].index,"),
    ("3.5 derate caps BLOCKS only", "first.kind == BLOCKS and first.pool in sm_flows", "first.pool in sm_flows"),
    ("3.5 derate while a FLOW moves", "first.kind == BLOCKS and first.pool in sm_flows", "first.kind == BLOCKS"),
    (
        "3.5 a resident FLOW that does not move derates nobody",
        "for runner in order for task in runner.tasks if task.kind == FLOW and task.sm > 0",
        "for task in self.tasks if task.kind == FLOW and task.held_sm > 0",
    ),
    ("3.5 derate by FLOWs with SMs only", "if task.kind == FLOW and task.sm > 0", "if task.kind == FLOW"),
    ("3.5 derate in the same pool", "first.pool in sm_flows", "sm_flows"),
)

_SHARE = (
    ("3.5 overload counts caps", "total += ask[k][r] * cap[k]", "total += ask[k][r]"),
    ("3.5 overload is above C", "if total > capacity[r]:", "if total >= capacity[r]:"),
    ("3.5 overload is summed in order", "for k in ks:\n            total", "for k in reversed(ks):\n            total"),
    ("3.5 only users of overloaded resources share", "if total > capacity[r]:", "if True:"),
    ("3.5 fixed counts what the settled use", "fixed += ask[k][r] * x[k]", "fixed += ask[k][r]"),
    ("3.5 fixed is left out of C", "capacity[r] - fixed", "capacity[r]"),
    (
        "3.5 fixed and slope are summed in order",
        "for k in ks:\n                if k in still_open:",
        "for k in reversed(ks):\n                if k in still_open:",
    ),
    ("3.5 slope counts weights", "slope += ask[k][r] * weight[k]", "slope += ask[k][r]"),
    ("3.5 the least lam decides", "least = min(", "least = max("),
    ("3.5 rounds until none is open", "still_open -= settling", "still_open.clear()"),
    ("3.5 cap / weight equal to lam settles at cap", "cap[k] / weight[k] <= least}", "cap[k] / weight[k] < least}"),
    ("3.5 cap is divided by weight", "cap[k] / weight[k] <= least}", "cap[k] <= least * weight[k]}"),
    ("3.5 those that reach their cap settle first", "if not settling:", "if True:"),
    (
        "3.5 all equal lam settle at once",
        "for r in lam if lam[r] == least for k",
        "for r in [r for r in lam if lam[r] == least][:1] for k",
    ),
    (
        "3.5 all equal lam settle at once, the last too",
        "for r in lam if lam[r] == least for k",
        "for r in [r for r in lam if lam[r] == least][-1:] for k",
    ),
    ("3.5 x is at least 2^-16", "max(SLOWEST, least * weight[k])", "least * weight[k]"),
    ("3.5 x = lam * weight", "max(SLOWEST, least * weight[k])", "max(SLOWEST, least)"),
)

_NUMBERS = (
    ("3.6 an end is rounded up", "math.ceil(remaining / x)", "int(remaining / x)"),
    ("3.6 an end is at least 1 ps away", "max(1, math.ceil(remaining / x))", "math.ceil(remaining / x)"),
    ("3.6 what was done went at the old speed", "remaining - x * float(", "remaining - runner.x * float("),
    (
        "3.6 remaining counts from the last change",
        "x, since = runner.x, self.env.now\n",
        "x, since = runner.x, min(self.env.now, locals().get('since', self.env.now))\n",
    ),
    (
        "3.6 remaining keeps its fraction",
        "remaining = max(0.0, remaining - x * float(self.env.now - since))",
        "remaining = max(0.0, round(remaining - x * float(self.env.now - since)))",
    ),
    (
        "3.6 an equal speed touches nothing",
        "if x != runner.x:\n                    runner.x",
        "if True:\n                    runner.x",
    ),
    ("3.6 a new speed counts for units that run", "process.interrupt()", "pass"),
    (
        "3.6 units start with their nominal time",
        "remaining = float(runner.unit_ps)",
        "remaining = float(runner.unit_ps) * runner.x",
    ),
)

MUTATIONS = (
    *(Mutation(rule, "reference.py", old, new) for rule, old, new in (*_LIFE, *_INSTANT, *_SMS, *_UNITS, *_SPEEDS)),
    *(Mutation(rule, "share.py", old, new) for rule, old, new in _SHARE),
    *(Mutation(rule, "reference.py", old, new) for rule, old, new in _NUMBERS),
)
