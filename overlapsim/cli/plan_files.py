"""What `plan -o DIR` leaves behind: the plan file, tables, a trace and plots."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any, Final

import msgspec

from overlapsim.cli.plan_view import layout_json
from overlapsim.errors import UsageError
from overlapsim.plan import StepPlan, dump_plan
from overlapsim.planner.explain import label
from overlapsim.planner.step import StepAnswer
from overlapsim.report.files import check_writable, write_bytes, write_text

FILES: Final = {
    "plan": "plan.yaml",
    "table": "plans.csv",
    "JSON": "plans.json",
    "trace": "trace.json.gz",
    "plot of plans": "plans.png",
    "plot of the pipeline": "timeline.png",
}
_COLUMNS: Final = (
    "step_time_s",
    "low_s",
    "high_s",
    "undisturbed_s",
    "perturbed_s",
    "mfu",
    "memory_bytes",
    "exposed_s",
    "lower_bound_s",
)


def output_folder(path: Path) -> Path:
    """The folder for an answer's files, made where it does not exist; asked for before any work.

    Raises
    ------
    UsageError
        If `path` is a file or cannot be made.
    """
    if path.suffix in (".yaml", ".yml", ".json") or path.is_file():
        raise UsageError(f"-o is {path}; expected a folder: a plan of a step is a plan file, tables, a trace and plots")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {path}: {error.strerror}; choose another one") from None
    for name in FILES.values():
        check_writable(path / name)
    return path


def write_answer(plan: StepPlan, content: dict[str, Any], answer: StepAnswer, folder: Path) -> list[tuple[str, Path]]:
    """Write all files of an answer; returns what each is, and where.

    Raises
    ------
    UsageError
        If a file cannot be written.
    """
    from overlapsim.report.plan_plot import plan_plot
    from overlapsim.report.plots import gantt
    from overlapsim.report.trace import write_trace
    from overlapsim.report.window import first_part_ps

    files = {what: folder / name for what, name in FILES.items()}
    best = answer.ranked[0].result
    name = best.inputs.model.name
    write_text(files["plan"], dump_plan(plan))
    write_text(files["table"], table_csv(plan, content))
    write_bytes(files["JSON"], msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    write_trace(best.timeline, files["trace"], title=f"{name}: {label(best)}, one GPU of each stage")
    plan_plot(plan, files["plot of plans"])
    until_ps = first_part_ps(best.timeline)
    title = f"{name}: {best.inputs.layout}"
    gantt({"plan 1": best.timeline}, files["plot of the pipeline"], title=title, until_ps=until_ps)
    return list(files.items())


def table_csv(plan: StepPlan, content: dict[str, Any]) -> str:
    """One line a plan: its rank, layout, settings and numbers."""
    entries = content["plans"]
    layouts = [layout_json(entry) for entry in (plan.choice, *plan.alternatives)]
    names = list(dict.fromkeys(key for layout in layouts for key in layout))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["rank", *names, "strategies", *_COLUMNS])
    for entry, layout in zip(entries, layouts, strict=True):
        chosen = " ".join(f"{op['operator']}:{op['pass']}={op['strategy']}" for op in entry["strategies"])
        cells = [layout.get(name, "") for name in names]
        writer.writerow([entry["rank"], *cells, chosen, *(entry[name] for name in _COLUMNS)])
    return text.getvalue()
