"""Which runner takes which plan, and what its settings must be; no torch until one is made."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from overlapsim.errors import PlanError
from overlapsim.plan import Finding

if TYPE_CHECKING:
    from overlapsim.validate.numerics import Problem
    from overlapsim.validate.plans import RunSpec
    from overlapsim.validate.runners.base import Runner


@dataclass(frozen=True)
class Entry:
    """One runner.

    Attributes
    ----------
    make : ``module:function`` that takes a Problem
    collectives : it takes
    check : raises PlanError where the settings do not fit
    """

    make: str
    collectives: tuple[str, ...]
    check: Callable[[RunSpec], None]


def check_settings(spec: RunSpec, others: Sequence[str] = ()) -> None:
    """Refuse plans that no runner takes, or whose settings do not fit the output.

    Parameters
    ----------
    others : further strategies that the plan holds for its shape, of which those with a runner are named

    Raises
    ------
    PlanError
        Naming the setting.
    """
    having = [name for name in others if name in RUNNERS and spec.collective in RUNNERS[name].collectives]
    advice = (
        f"; of the plan's alternatives {', '.join(having)} {'have' if len(having) > 1 else 'has'} one: write their "
        "plan with `operator --strategy NAME -o FILE`"
        if having
        else ""
    )
    entry = _entry(spec.strategy, advice)
    if spec.collective not in entry.collectives:
        raise PlanError(
            f"the runner of {spec.strategy} takes {', '.join(entry.collectives)}; the plan is for {spec.collective}"
            f"{advice}"
        )
    entry.check(spec)


def unapplied(spec: RunSpec) -> tuple[Finding, ...]:
    """What a plan asks for that its runner does not do: times may differ from the plan's for it."""
    settings, found = spec.settings, []
    if settings.get("comm_engine") in ("copy_engine", "nvls") or settings.get("transport") in ("copy_engine", "stores"):
        text = "transfers go through the library and hold SMs; the plan priced copy engines, stores or the switch"
        found.append(Finding("transport_not_applied", text))
    if settings.get("comm_sms"):
        text = (
            f"the plan gives the collective {settings['comm_sms']} SMs; NCCL takes NCCL_MAX_CTAS for the whole process"
        )
        found.append(Finding("comm_sms_not_applied", text))
    if settings.get("sm_margin"):
        text = "the plan keeps the vendor's GEMM off the collective's SMs; the library is not told"
        found.append(Finding("sm_margin_not_applied", text))
    if settings.get("keep_gathered"):
        found.append(Finding("keep_gathered_not_applied", "the gathered rows are not copied out behind the GEMM"))
    return tuple(found)


def make_runner(problem: Problem) -> Runner:
    """Runner of a plan on this rank; imports torch and what the plan needs, and sets its kinds of arithmetic."""
    if problem.device.type == "cuda":
        _set_arithmetic(problem.spec)
    module, _, function = _entry(problem.spec.strategy).make.partition(":")
    runner: Runner = getattr(importlib.import_module(module), function)(problem)
    return runner


def _set_arithmetic(spec: RunSpec) -> None:
    """Tell the vendor's GEMMs which types to multiply and to add in, as the plan was priced."""
    import torch

    matmul: Any = torch.backends.cuda.matmul
    matmul.allow_tf32 = spec.dtype == "tf32"
    half = spec.accumulate == "fp16"
    if hasattr(matmul, "allow_fp16_accumulation"):
        matmul.allow_fp16_accumulation = half
    elif half:
        raise PlanError(
            "the plan accumulates in fp16, which this torch does not offer; install torch 2.7 or newer, or plan with "
            "--accumulate fp32"
        )


def _entry(strategy: str, advice: str = "") -> Entry:
    if strategy not in RUNNERS:
        raise PlanError(
            f"no runner for strategy {strategy!r}; expected one of {', '.join(RUNNERS)}"
            f"{advice or ': plan with --strategy NAME'}"
        )
    return RUNNERS[strategy]


def _nothing(spec: RunSpec) -> None:
    """Serial execution leaves nothing open."""


def _check_rows(key: str) -> Callable[[RunSpec], None]:
    """Check of a setting that holds the rows of each piece."""

    def check(spec: RunSpec) -> None:
        rows = spec.settings.get(key)
        whole = isinstance(rows, list | tuple) and all(type(count) is int and count > 0 for count in rows)
        if not whole or not rows or sum(rows) != spec.m:
            raise PlanError(
                f"{key} in the plan's settings is {rows!s:.80}; expected positive counts that add up to the {spec.m} "
                "rows: plan again"
            )

    return check


def _check_ring(spec: RunSpec) -> None:
    from overlapsim.validate.runners.ring_steps import gather_steps, scatter_steps

    _check_rows("step_rows")(spec)
    make = gather_steps if spec.collective == "all_gather" else scatter_steps
    steps = make(0, spec.ranks, str(spec.settings.get("form")))
    if len(steps) != len(spec.settings["step_rows"]):
        raise PlanError(
            f"step_rows has {len(spec.settings['step_rows'])} steps; a {spec.settings['form']} ring of {spec.ranks} "
            f"ranks has {len(steps)}: plan again"
        )


def _check_pair(spec: RunSpec) -> None:
    if spec.independent_bytes is None:
        raise PlanError("a bulk plan without independent_bytes in its inputs; plan again with --independent SIZE")


def _check_ways(spec: RunSpec) -> None:
    way = spec.settings.get("way")
    known = ("decomposed",) if spec.collective == "reduce_scatter" else ("nvls_gather", "flag_gemm", "decomposed")
    if way not in known:
        raise PlanError(f"way in the plan's settings is {way!r}; expected {' or '.join(known)}: plan again")
    if way == "decomposed":
        _check_rows("step_rows")(spec)
    if way == "flag_gemm" and spec.m % spec.ranks:
        raise PlanError(f"flag_gemm takes rows that divide over the ranks; {spec.m} over {spec.ranks} do not")


def _check_fused(spec: RunSpec) -> None:
    from overlapsim.validate.kernels.config import GemmConfig

    GemmConfig.from_settings({"stages": 3, **spec.settings})
    rows = spec.settings.get("comm_rows")
    if type(rows) is not int or rows < 1:
        raise PlanError(f"comm_rows in the plan's settings is {rows!r}; expected rows of a comm tile: plan again")
    if spec.m % spec.ranks:
        raise PlanError(f"the fused runner takes rows that divide over the ranks; {spec.m} over {spec.ranks} do not")


def _check_groups(spec: RunSpec) -> None:
    from overlapsim.validate.kernels.config import GemmConfig
    from overlapsim.validate.plans import check_map

    check_map(spec)
    GemmConfig.from_settings(spec.settings)


_AFTER: Final = ("all_reduce", "reduce_scatter", "all_to_all")
_ROOM: Final = "overlapsim.validate.runners"
RUNNERS: Final[Mapping[str, Entry]] = {
    "serial": Entry(f"{_ROOM}.chunked:make_serial", ("all_gather", *_AFTER), _nothing),
    "chunked": Entry(f"{_ROOM}.chunked:make_chunked", ("all_gather", *_AFTER), _check_rows("chunk_rows")),
    "pipelined_rs": Entry(f"{_ROOM}.chunked:make_pipelined", ("reduce_scatter",), _check_rows("split_rows")),
    "wave_group": Entry(f"{_ROOM}.wave_group:make", _AFTER, _check_groups),
    "ring_exchange": Entry(f"{_ROOM}.ring_exchange:make", ("all_gather", "reduce_scatter"), _check_ring),
    "async_tp": Entry(f"{_ROOM}.async_tp:make", ("all_gather", "reduce_scatter"), _check_ways),
    "bulk": Entry(f"{_ROOM}.bulk:make", ("all_gather", *_AFTER), _check_pair),
    "fused_tiles": Entry(f"{_ROOM}.fused_tiles:make", ("all_gather",), _check_fused),
}
"""Runners by strategy."""
