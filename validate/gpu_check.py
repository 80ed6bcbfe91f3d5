"""One GPU checked in a few minutes: kernels right, then timed, then held against a profile.

``python -m overlapsim.validate.gpu_check -o DIR`` writes records (docs/records.md) and a report; ``--dry-run`` says
what it would do and how long that takes, and needs neither a GPU nor torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from overlapsim.validate.budget import Budget
from overlapsim.validate.one_gpu.cases import SECTIONS, Case, fit_budget, plan_cases
from overlapsim.validate.one_gpu.report import Figure, figures, profile_of

from overlapsim.cli.main import run as run_command
from overlapsim.cli.output import console, print_json
from overlapsim.errors import OverlapSimError, UsageError
from overlapsim.plan import Finding
from overlapsim.report.files import write_text
from overlapsim.units import format_time

if TYPE_CHECKING:
    from overlapsim.validate.ranks import Ranks

    from overlapsim.calibration.records import Record
    from overlapsim.hardware.profile import Cluster

BUDGET_S: Final = 360.0
VERIFY_S: Final = 75.0
"""Of the budget for numerics: some twenty kernels to compile, and runs that take no time."""
START_S: Final = 15.0
REHEARSAL_SCALE: Final = 64
REHEARSAL_SMS: Final = 4
DRY_SMS: Final = 132
REPEATS: Final = 20
WARMUP_S: Final = 0.03


@click.command("gpu-check")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder for records and report.")
@click.option("--device", help="Device of the catalogue to compare with; by default the one that the driver names.")
@click.option("--dtype", type=click.Choice(("bf16", "fp16")), default="bf16", show_default=True)
@click.option("--time-budget", type=click.FloatRange(20, 3600), default=BUDGET_S, show_default=True, help="Seconds.")
@click.option("--dry-run", is_flag=True, help="Print the cases and the time they take at most; runs nothing.")
@click.option("--rehearse", is_flag=True, help="Tiny sizes in Triton's interpreter (TRITON_INTERPRET=1): no times.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    output: Path | None,
    device: str | None,
    dtype: str,
    time_budget: float,
    dry_run: bool,
    rehearse: bool,
    as_json: bool,
) -> None:
    """Check and time this machine's first GPU; write records.csv, kernels.csv and report.json.

    records.csv holds what profiles are fitted to (`overlapsim calibrate`); kernels.csv holds times of kernels of ours,
    which must not be taken for the vendor library's.
    """
    if dry_run:
        return _print_plan(plan_cases(DRY_SMS, dtype), time_budget, as_json)
    if output is None:
        raise UsageError("no folder to write to; give -o DIR, or --dry-run")
    output.mkdir(parents=True, exist_ok=True)
    budget = Budget(time_budget)
    budget.announce("numerics, then times of kernels on one GPU", loud=not as_json)
    with _one_rank(rehearse) as ranks:
        content = _check(ranks, output, budget, device, "fp16" if rehearse else dtype, rehearse, not as_json)
    write_text(output / "report.json", msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n")
    if as_json:
        print_json(content)
    else:
        _print_report(content)


def _check(
    ranks: Ranks, output: Path, budget: Budget, device: str | None, dtype: str, rehearse: bool, loud: bool
) -> dict[str, Any]:
    import torch
    from overlapsim.validate.kernels.checks import device_sms
    from overlapsim.validate.measure import Sampler, Sampling
    from overlapsim.validate.one_gpu.bench import Bench
    from overlapsim.validate.one_gpu.inside import Rehearsal
    from overlapsim.validate.one_gpu.verify import Verifier
    from overlapsim.validate.output import RecordFile, header_of, timed

    num_sms = device_sms(torch.empty(0, device=ranks.device))
    header = header_of(ranks)
    findings = [Finding("rehearsal", "CPU interpreter at tiny sizes: no time here means anything")] if rehearse else []
    for name, check in Verifier(ranks.device, num_sms).checks():
        budget.tell(f"right? {name}", loud)
        check()
    cases = plan_cases(num_sms, dtype, REHEARSAL_SCALE if rehearse else 1)
    files = {own: RecordFile(output / name, header) for own, name in ((False, "records.csv"), (True, "kernels.csv"))}
    sampler = Rehearsal(ranks) if rehearse else Sampler(ranks, Sampling(repeats=REPEATS, warmup_s=WARMUP_S))
    bench = Bench(sampler, num_sms)
    measured: dict[Case, Record] = {}
    skipped: list[str] = []
    for case in cases:
        earlier = files[case.own_kernel].find(case.recorded)
        if earlier is not None:
            measured[case] = earlier
        elif case.estimate_s > budget.left_s:
            skipped.append(case.name)
        else:
            budget.tell(case.name, loud)
            try:
                measured[case] = files[case.own_kernel].add(timed(case.recorded, bench.time(case)))
            except OverlapSimError as error:
                # One kernel that this GPU cannot launch must not cost the rest.
                findings.append(Finding("case_failed", f"{case.name}: {error}"))
    if skipped:
        findings.append(Finding("out_of_time", f"{len(skipped)} cases were not timed: {', '.join(skipped[:5])} ..."))
    cluster, found = _profile(header.device, device)
    findings += found
    return {
        "device": header.device,
        "profile": None if cluster is None else cluster.device.name,
        "num_sms": num_sms,
        "spent_s": round(budget.spent_s, 1),
        "num_cases": len(cases),
        "num_timed": len(measured),
        "num_not_valid": sum(not record.valid for record in measured.values()),
        "figures": [_cells(figure) for figure in figures(measured, None if cluster is None else cluster.device)],
        "compare": _compared([record for case, record in measured.items() if not case.own_kernel], cluster, findings),
        "findings": [asdict(finding) for finding in findings],
    }


def _profile(product: str, device: str | None) -> tuple[Cluster | None, list[Finding]]:
    """Cluster whose device this GPU is; None, with a finding, if the catalogue has none."""
    from overlapsim.hardware.loading import nearest_cluster

    name = device or profile_of(product)
    if name is None:
        text = f"no device of the catalogue is {product!r}: nothing to compare with; give --device"
        return None, [Finding("no_profile", text)]
    return nearest_cluster(name), []


def _compared(records: Sequence[Record], cluster: Cluster | None, findings: list[Finding]) -> list[dict[str, Any]]:
    from overlapsim.calibration.compare import compare

    if cluster is None:
        return []
    try:
        result = compare(records, cluster)
    except OverlapSimError as error:
        findings.append(Finding("not_compared", str(error)))
        return []
    findings.extend(result.findings)
    return [asdict(line) for line in (*result.lines, *result.slowdowns)]


def _one_rank(rehearse: bool) -> Any:
    """Return this process as the only rank: a store in memory, no network."""
    from contextlib import contextmanager

    @contextmanager
    def joined() -> Any:
        import torch
        import torch.distributed as dist
        from overlapsim.validate.kernels.checks import INTERPRETED
        from overlapsim.validate.ranks import TIMEOUT_S, Ranks

        if rehearse and not INTERPRETED:
            raise UsageError("a rehearsal runs in Triton's interpreter; set TRITON_INTERPRET=1")
        if not rehearse and (INTERPRETED or not torch.cuda.is_available()):
            raise UsageError(
                "no GPU that torch can use, or TRITON_INTERPRET is set; run this on a GPU, or give --dry-run or "
                "--rehearse"
            )
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        device = torch.device("cpu") if rehearse else torch.device("cuda", 0)
        try:
            yield Ranks(0, 1, 0, 1, 1, "gloo" if rehearse else "nccl", device, TIMEOUT_S, store)
        finally:
            dist.destroy_process_group()

    return joined()


def _print_plan(cases: Sequence[Case], budget_s: float, as_json: bool) -> None:
    kept, dropped = fit_budget(cases, budget_s - VERIFY_S - START_S)
    estimate_s = START_S + VERIFY_S + sum(case.estimate_s for case in kept)
    content = {
        "time_budget_s": budget_s,
        "numerics_s": VERIFY_S,
        "estimate_s": round(estimate_s, 1),
        "num_sms": DRY_SMS,
        "cases": [{"section": case.section, "name": case.name, "estimate_s": case.estimate_s} for case in kept],
        "dropped": [case.name for case in dropped],
    }
    if as_json:
        return print_json(content)
    click.echo(
        f"time budget {format_time(budget_s)}; at most {format_time(estimate_s)} on a slow GPU, "
        f"{format_time(VERIFY_S)} of it for numerics; {len(kept)} cases, {len(dropped)} dropped"
    )
    for section, text in SECTIONS.items():
        mine = [case for case in kept if case.section == section]
        click.echo(f"\n{text} ({len(mine)} cases, {format_time(sum(case.estimate_s for case in mine))})")
        for case in mine:
            click.echo(f"  {case.name}")


def _print_report(content: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("figure", "measured", f"profile {content['profile'] or '(none)'}", "error", "points", box=None)
    for figure in content["figures"]:
        show = format_time if figure["unit"] == "s" else "{:.3g}".format
        predicted, error = figure["predicted"], figure["error"]
        table.add_row(
            *(figure["name"], show(figure["measured"])),
            *("" if predicted is None else show(predicted), "" if error is None else f"{error:+.0%}"),
            str(figure["num_points"]),
        )
    console().print(table)
    for line in content["compare"]:
        click.echo(
            f"{line['group']}, {line['regime']}: median error {line['median_signed']:+.1%} over {line['num_points']}"
        )
    for finding in content["findings"]:
        click.echo(f"{finding['code']}: {finding['message']}", err=True)
    click.echo(
        f"{content['num_timed']} of {content['num_cases']} cases timed, {content['num_not_valid']} not valid, "
        f"in {format_time(content['spent_s'])}"
    )


def _cells(figure: Figure) -> dict[str, Any]:
    return {**asdict(figure), "error": figure.error}


if __name__ == "__main__":
    run_command(command, "python -m overlapsim.validate.gpu_check", sys.argv[1:])  # type: ignore[arg-type]
