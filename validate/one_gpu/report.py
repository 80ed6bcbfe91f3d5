"""What measured times say of a profile: its own constants measured again, and prices against times; needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from overlapsim.validate.one_gpu.cases import (
    GROUP_COUNTS,
    LARGE_TILE,
    PACKED,
    PLAIN,
    RANKS,
    SIGNALLED,
    TILE,
    VENDOR,
    Case,
)

from overlapsim.calibration.records import Record
from overlapsim.cost.gemm import template_gemm_cost
from overlapsim.hardware.loading import list_profiles
from overlapsim.hardware.profile import DeviceSpec
from overlapsim.workload.operators import GemmOp

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Figure:
    """One figure, measured, and what the profile says of it.

    Attributes
    ----------
    name : in words
    measured : ratio, or seconds
    predicted : by the profile; None where it has no such constant
    unit : ``ratio`` or ``s``
    num_points : measured pairs behind it; the figure is their median
    """

    name: str
    measured: float
    predicted: float | None
    unit: str
    num_points: int

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus one."""
        return None if self.predicted is None else self.predicted / self.measured - 1


def profile_of(product: str) -> str | None:
    """Device of the catalogue that a driver's product name means; None if none or several could be.

    Examples
    --------
    >>> profile_of("NVIDIA H200"), profile_of("NVIDIA A100-SXM4-40GB"), profile_of("NVIDIA H100 80GB HBM3")
    ('h200-sxm-141gb', 'a100-sxm4-40gb', 'h100-sxm5-80gb')
    """
    words = product.lower().replace("-", " ").removeprefix("nvidia ").replace("geforce ", "").split()
    names = {name: name.split("-") for name in list_profiles("device")}
    # What the driver calls HBM3 is the SXM board of an H100; the PCIe board says so.
    wanted = [word for word in words if word not in ("hbm3", "hbm3e", "hbm2e", "generation")]
    if words[:1] == ["h100"] and "hbm3" in words:
        wanted.append("sxm5")
    found = [name for name, parts in names.items() if all(word in parts for word in wanted)]
    exact = [name for name in found if len(names[name]) == len(wanted)]
    candidates = exact or found
    return candidates[0] if len(candidates) == 1 else None


def figures(measured: Mapping[Case, Record], device: DeviceSpec | None) -> tuple[Figure, ...]:
    """Everything that pairs of times say, each beside the profile's constant or price.

    Parameters
    ----------
    measured : by case; those that are not valid are passed over
    device : profile, or None to list measurements alone
    """
    times = {case: record.median_s for case, record in measured.items() if record.valid}
    kernels = None if device is None else device.kernels
    found: list[Figure] = []

    def add(name: str, values: Sequence[float], predicted: float | None = None, unit: str = "ratio") -> None:
        if values:
            found.append(Figure(name, median(values), predicted, unit, len(values)))

    def over(first: Callable[[Case], bool], second: Callable[[Case], bool]) -> list[float]:
        return ratios(times, first, second)

    add(
        "template over vendor GEMM",
        over(_is(SIGNALLED, "gemm", TILE), _is(VENDOR, "gemm")),
        None if kernels is None else kernels.template_slowdown,
    )
    add("the same with the large tile", over(_is(SIGNALLED, "gemm", LARGE_TILE), _is(VENDOR, "gemm")))
    add("reordered over plain template", over(_is(PACKED, "gemm", TILE), _is(PLAIN, "gemm", TILE)))
    add("signalled over reordered template", over(_is(SIGNALLED, "gemm", TILE), _is(PACKED, "gemm", TILE)))
    for op in ("restored_rmsnorm", "restored_add"):
        for variant in ("tile", "subtile"):
            values = over(_is(op, "consumer", variant=variant), _is(op, "consumer", variant="row_major"))
            # A rank's rows are a part of all, and so is its time.
            add(
                f"{op} by {variant} over row order",
                [value * (RANKS if variant == "subtile" else 1) for value in values],
            )
    found += _fewer_sms(times, device)
    found += _waves(times, device)
    add("GEMM beside a copy over alone", _beside(times, VENDOR))
    add("copy beside GEMMs over alone", _beside(times, "copy"))
    for groups in GROUP_COUNTS[1:]:
        values = over(
            lambda case, groups=groups: case.variant == "overlapped" and case.groups == groups,  # type: ignore[misc]
            _is(SIGNALLED, "wave_group", variant="serial"),
        )
        add(f"{groups} wave groups with copies over vendor GEMM, then copy", values)
    for op, predicted in (
        ("kernel", None if kernels is None else kernels.gemm_launch_s),
        ("event", None),
        ("wait_group", None),
        ("signal", None if kernels is None else kernels.signal_wait_s),
    ):
        add(f"launch: {op}", [time for case, time in times.items() if case.like.op == op], predicted, "s")
    return tuple(found)


def ratios(times: Mapping[Case, float], first: Callable[[Case], bool], second: Callable[[Case], bool]) -> list[float]:
    """Times of the first over those of the second, pair by pair of equal sizes."""
    below = {_sizes(case): time for case, time in times.items() if second(case)}
    return [time / below[_sizes(case)] for case, time in times.items() if first(case) and _sizes(case) in below]


def _fewer_sms(times: Mapping[Case, float], device: DeviceSpec | None) -> list[Figure]:
    result = []
    whole = {
        "persistent": next((t for c, t in times.items() if _persistent(c) and c.like.sms_left == _most(times)), None),
        "held": next((t for c, t in times.items() if _is(VENDOR, "gemm")(c) and _sizes(c) == _sms_sizes(times)), None),
    }
    for case, time in times.items():
        left, most, base = case.like.sms_left, _most(times), whole.get(case.variant)
        if case.section != "sms" or not left or not most or left == most or not base:
            continue
        name = f"{'persistent template' if case.variant == 'persistent' else 'vendor GEMM'} on {left} of {most} SMs"
        predicted = None
        if device is not None and device.num_sms == most and case.variant == "persistent":
            op = _gemm_of(case)
            predicted = (
                template_gemm_cost(op, device, sms=left, tile=case.tile).duration_s
                / template_gemm_cost(op, device, sms=most, tile=case.tile).duration_s
            )
        result.append(Figure(name, time / base, predicted, "ratio", 1))
    return result


def _waves(times: Mapping[Case, float], device: DeviceSpec | None) -> list[Figure]:
    """A tile more than whole waves: a wave more, if waves are what the model says."""
    result = []
    by_variant = {case.variant: (case, time) for case, time in times.items() if case.section == "waves"}
    for variant, (case, time) in by_variant.items():
        more = by_variant.get(f"{variant} and more")
        if more is None:
            continue
        predicted = None
        if device is not None:
            costs = [template_gemm_cost(_gemm_of(c), device, tile=c.tile).duration_s for c in (more[0], case)]
            predicted = costs[0] / costs[1]
        result.append(Figure(f"a column of tiles more than {variant}", more[1] / time, predicted, "ratio", 1))
    return result


def _beside(times: Mapping[Case, float], op: str) -> list[float]:
    def alone(case: Case) -> bool:
        section = "contention" if op == "copy" else "gemm"
        return case.like.op == op and case.like.alone and case.section == section

    return ratios(times, lambda case: case.like.op == op and not case.like.alone, alone)


def _is(op: str, section: str, tile: tuple[int, ...] | None = None, *, variant: str = "") -> Callable[[Case], bool]:
    def matches(case: Case) -> bool:
        same = case.like.op == op and case.section == section and case.variant == variant
        return same and (tile is None or case.tile == tile)

    return matches


def _persistent(case: Case) -> bool:
    return case.section == "sms" and case.variant == "persistent"


def _most(times: Mapping[Case, float]) -> int:
    return max((case.like.sms_left or 0 for case in times if _persistent(case)), default=0)


def _sms_sizes(times: Mapping[Case, float]) -> Key:
    return next((_sizes(case) for case in times if case.section == "sms"), ())


def _sizes(case: Case) -> Key:
    return (case.like.m, case.like.n, case.like.k)


def _gemm_of(case: Case) -> GemmOp:
    record = case.like
    assert record.m and record.n and record.k
    return GemmOp(record.m, record.n, record.k, record.dtype)
