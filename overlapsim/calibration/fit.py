"""Calibration: records in, what they say of one machine out, each part judged on what it had not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from overlapsim.calibration.fit_collective import CollectiveRow, fit_collective, residuals, with_spread
from overlapsim.calibration.fit_contention import Slowdown, fit_contention
from overlapsim.calibration.fit_curve import CurveFit, fit_curve, group_collectives, main_conditions
from overlapsim.calibration.fit_device import KernelFit, fit_kernel, kernel_tables
from overlapsim.calibration.predict import solo_seconds
from overlapsim.calibration.records import NO_HEADER, Header, Record
from overlapsim.calibration.regimes import SIZE_REGIMES, FloatArray, RegimeError, judge, told
from overlapsim.cost.fitted import REGIMES
from overlapsim.errors import CalibrationError, ProfileError, WorkloadError
from overlapsim.hardware.profile import Cluster, Fit, Source
from overlapsim.plan import Finding

REFERENCE: Final = "records.csv"
"""Source that a calibrated profile names: the records beside it."""
RING: Final = ("all_reduce", "all_gather", "reduce_scatter")
# A structural fit carries over to rank counts and collectives that were not timed; from less it would be a guess.
LEAST_RANK_COUNTS: Final = 2
LEAST_COLLECTIVES: Final = 2
LEAST_SPREAD_POINTS: Final = 8


@dataclass(frozen=True)
class StructuralFit:
    """Constants of the collectives of one node, for rank counts without a curve, and their errors by size."""

    fit: Fit
    regimes: tuple[RegimeError, ...]
    accepted: bool


@dataclass(frozen=True)
class Calibration:
    """What measurements say of one machine.

    Attributes
    ----------
    base, base_name : profile it was compared with, and its name
    cluster : the base with everything accepted put in: what the written profile gives when loaded
    curves, kernels, structural, contention : the parts, accepted or not
    records, header : all records, and where they were taken
    findings : of readers and fits
    """

    base: Cluster
    base_name: str
    cluster: Cluster
    curves: tuple[CurveFit, ...]
    kernels: tuple[KernelFit, ...]
    structural: StructuralFit | None
    contention: tuple[Slowdown, ...]
    records: tuple[Record, ...]
    header: Header
    findings: tuple[Finding, ...] = field(default=())

    @property
    def num_accepted(self) -> int:
        """Curves and kernels that go into the profile."""
        return sum(curve.accepted for curve in self.curves) + sum(kernel.accepted for kernel in self.kernels)


def calibrate(
    records: Sequence[Record],
    base: Cluster,
    base_name: str,
    *,
    header: Header = NO_HEADER,
    findings: Iterable[Finding] = (),
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Fit everything that the records hold.

    Solo times come first: curves of collectives, then kernels. What ran beside something else is compared with the
    fitted solo prices afterwards and constrains contention only.

    Parameters
    ----------
    records : of one machine
    base, base_name : a profile of the same kind of machine
    header : of the records
    findings : of the readers, kept with those of the fits
    progress : called with a line for people before each part

    Raises
    ------
    CalibrationError
        If there are no usable records, times cannot be what they say, ranks do not fit the base's nodes, or no part
        is accepted.
    """
    tell = progress or (lambda message: None)
    usable = [record for record in records if record.valid]
    if not usable:
        raise CalibrationError(f"none of the {len(records)} records is valid; see what was left out and why")
    wide = base.with_nodes(max(base.num_nodes, *(record.nodes or 1 for record in usable)))
    findings = [*findings, *_other_device(header, base)]
    groups = group_collectives(usable)
    conditions, told_conditions = main_conditions(groups)
    findings += told_conditions
    curves = []
    for number, condition in enumerate(conditions, start=1):
        tell(f"curve {number} of {len(conditions)}: {condition.key.collective}, {condition.key.ranks} ranks")
        curves.append(fit_curve(condition, groups[condition], wide, base_name))
    tables, told_tables = kernel_tables(usable)
    findings += told_tables
    kernels = []
    for table in tables:
        tell(f"{table.name}: {table.time_s.size} shapes")
        try:
            kernels.append(fit_kernel(table, base.device, base_name, REFERENCE))
        except (ProfileError, WorkloadError) as error:
            findings.append(Finding("type_not_priced", f"{table.name}: {table.time_s.size} rows left out: {error}"))
    structural = _structural(curves, base, findings, tell)
    cluster = _applied(base, curves, kernels, structural)
    if any(not record.alone for record in usable):
        tell("contention")
    contention = fit_contention(usable, lambda record: solo_seconds(record, cluster))
    findings += _left_over(records, usable)
    findings += [finding for curve in curves for finding in curve.findings]
    findings += [finding for kernel in kernels for finding in kernel.findings]
    result = Calibration(
        base,
        base_name,
        cluster,
        tuple(curves),
        tuple(kernels),
        structural,
        contention,
        tuple(records),
        header,
        tuple(findings),
    )
    if not result.num_accepted and not contention:
        reasons = [finding.message for finding in findings if finding.code in ("not_accepted", "too_few_shapes")]
        raise CalibrationError(
            "nothing in these measurements can be accepted: " + "; ".join(reasons or ["no solo times"])
        )
    return result


def _applied(
    base: Cluster, curves: Iterable[CurveFit], kernels: Iterable[KernelFit], structural: StructuralFit | None
) -> Cluster:
    """The base with what was accepted, as the written profile gives it."""
    measured = {curve.key: curve.table(REFERENCE) for curve in curves if curve.accepted}
    fits = {f"{kernel.fit.family}.{kernel.fit.key}": kernel.fit for kernel in kernels if kernel.accepted and kernel.fit}
    device = replace(base.device, fits={**base.device.fits, **fits})
    own = {} if structural is None or not structural.accepted else {f"collective.{structural.fit.key}": structural.fit}
    return replace(
        base,
        node=replace(base.node, device=device),
        curves={**base.curves, **measured},
        fits={**base.fits, **own},
        calibrated=True,
    )


def _structural(
    curves: Sequence[CurveFit], base: Cluster, findings: list[Finding], tell: Callable[[str], None]
) -> StructuralFit | None:
    """Constants of one NVLink node, where the curves hold enough of it; fitted on two thirds of the sizes."""
    inside = [curve for curve in curves if curve.accepted and curve.key.nodes == 1]
    rings = [curve for curve in inside if curve.key.collective in RING]
    counts = {curve.key.ranks for curve in rings}
    if (
        base.node.nvlink_bandwidth_bytes_per_s <= 0
        or len(counts) < LEAST_RANK_COUNTS
        or len({curve.key.collective for curve in rings}) < LEAST_COLLECTIVES
    ):
        if inside:
            findings.append(
                Finding(
                    "curves_only",
                    "rank counts and collectives that were not timed keep the base's constants: those of a node are "
                    f"fitted from {LEAST_COLLECTIVES} of {', '.join(RING)} over {LEAST_RANK_COUNTS} rank counts",
                )
            )
        return None
    tell("constants of one node")
    rows = [
        CollectiveRow(curve.key.collective, curve.key.ranks, 1, float(point.size_bytes), point.time_s)
        for curve in inside
        for point in curve.points
    ]
    seen = [row for number, row in enumerate(rows) if number % 3 != 1]
    unseen = [row for number, row in enumerate(rows) if number % 3 == 1]
    architecture, reduces = base.device.architecture, base.node.switch_reduction
    try:
        fit = fit_collective(
            seen,
            architecture=architecture,
            link_bytes_per_s=base.node.nvlink_bandwidth_bytes_per_s,
            switch_reduction=reduces,
            source=Source("measured", REFERENCE, "high"),
        )
    except CalibrationError as error:
        findings.append(Finding("curves_only", f"the constants of a node were not fitted: {error}"))
        return None
    errors = residuals(fit, unseen, architecture, switch_reduction=reduces)
    sizes = np.array([row.size_bytes for row in unseen])
    priced = np.isfinite(errors)
    errors, sizes = errors[priced], sizes[priced]
    regimes = judge(errors, sizes, SIZE_REGIMES)
    accepted = all(regime.accepted for regime in regimes)
    if not accepted:
        findings.append(Finding("not_accepted", f"constants of a node: not accepted, left out: {told(regimes)}"))
    fit = with_spread(fit, _spread(1 / (1 + errors), sizes))
    return StructuralFit(fit, regimes, accepted)


def _spread(ratio: FloatArray, sizes: FloatArray) -> dict[str, tuple[float, float]]:
    """Central 90 % of measured over predicted by the regimes that the collective model knows."""
    starts = [start for _, start in REGIMES]
    regime = np.searchsorted(starts, sizes, side="right") - 1
    spread = {}
    for place, (name, _) in enumerate(REGIMES):
        mine = ratio[regime == place]
        if mine.size >= LEAST_SPREAD_POINTS:
            low, high = np.quantile(mine, (0.05, 0.95))
            spread[name] = (min(1.0, float(low)), max(1.0, float(high)))
    return spread


def _other_device(header: Header, base: Cluster) -> list[Finding]:
    """Whether the measurements name another model than the base's: right for a sister, wrong for a mix-up."""
    model = next((part for part in base.device.name.split("-") if any(c.isdigit() for c in part)), base.device.name)
    if not header.device or model in header.device.lower().replace(" ", ""):
        return []
    text = f"measured on {header.device!r}, the base is of {base.device.name}: peaks and links are the base's"
    return [Finding("device_differs", text)]


def _left_over(records: Sequence[Record], usable: Sequence[Record]) -> list[Finding]:
    findings = []
    if invalid := len(records) - len(usable):
        findings.append(Finding("not_valid", f"{invalid} records are marked not valid and were not used"))
    if launches := sum(record.kind == "launch" for record in usable):
        findings.append(Finding("launch_kept", f"{launches} launch records are kept; no part of the profile uses them"))
    return findings
