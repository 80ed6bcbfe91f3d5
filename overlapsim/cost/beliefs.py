"""What a price stands on that was not measured, as findings; and measured curves that cannot be believed."""

from __future__ import annotations

from typing import Final

from overlapsim.cost.collective import CollectiveModel
from overlapsim.errors import ProfileError
from overlapsim.hardware.bounds import wire_lower_bound_s
from overlapsim.hardware.check import contradictions
from overlapsim.hardware.profile import Cluster, CurveTable, DeviceSpec
from overlapsim.plan import Finding
from overlapsim.units import format_bytes, format_time
from overlapsim.workload.operators import CollectiveKind, GemmOp


def machine_findings(cluster: Cluster, gemm_measured: bool) -> list[Finding]:
    """What the profile dropped, where it contradicts itself, whether it and the vendor GEMM were measured."""
    found = [Finding("inherited_dropped", sentence) for sentence in cluster.dropped]
    found += [Finding("profile_contradicts_itself", sentence) for sentence in contradictions(cluster)]
    if not cluster.calibrated:
        message = (
            f"{cluster.name} holds published figures, not measurements of your machine; "
            "measured GEMM times and a measured curve narrow the ranges"
        )
        found.append(Finding("profile_not_calibrated", message))
    if not gemm_measured:
        message = "vendor GEMM priced by the profile's model: measure it with --gemm-time S"
        found.append(Finding("gemm_time_assumed", message))
    return found


FAR_FROM_MODEL: Final = 3.0


def slow_findings(ratio: float) -> list[Finding]:
    """Say where a measured vendor GEMM is far slower than its model: a slow setting, or a wrong unit or shape."""
    if ratio < FAR_FROM_MODEL:
        return []
    message = f"the measured GEMM takes {ratio:.1f} times what the model says: check the unit, the shape and the clocks"
    return [Finding("gemm_time_far_from_model", message)]


def kernel_finding(device: DeviceSpec, strategy: str) -> Finding:
    """Say what a strategy's own kernel was priced at."""
    message = (
        f"{strategy} kernel priced at {device.kernels.template_slowdown:.3g} x the vendor GEMM plus the store of each "
        f"wave: measure it with --kernel-time {strategy}=S"
    )
    return Finding("kernel_time_assumed", message)


def curve_findings(model: CollectiveModel, gemm: GemmOp | None) -> list[Finding]:
    """What is doubtful about a collective's price at the size of the GEMM's output."""
    curve, kind = model.curve, model.kind
    if curve is None:
        return list(model.findings)
    found = []
    # A fall far below the sizes in question is nobody's concern here.
    least = 0.01 * gemm.output_bytes if gemm is not None else 0.0
    falls = [(low, high) for low, high in curve.falls if high >= least]
    if falls:
        steps = ", ".join(f"{format_bytes(low)} to {format_bytes(high)}" for low, high in falls[:3])
        message = f"the {kind} curve falls with size ({steps}); used as measured: measure again if that is noise"
        found.append(Finding("curve_falls", message))
    if gemm is not None and not curve.in_range(gemm.output_bytes):
        message = f"{format_bytes(gemm.output_bytes)} of {kind} lies outside the measured sizes: extrapolated"
        found.append(Finding("curve_extrapolated", message))
    return found


# Buffers in cache and a link that beats its sheet a little are seen, and fallbacks to TCP some tens of times slower.
CURVE_SLACK: Final = 0.9
CURVE_SLOW: Final = 100.0


def check_curve(cluster: Cluster, kind: CollectiveKind, ranks: int, curve: CurveTable) -> None:
    """Refuse a measured curve whose largest size beats the links, or that only a wrong unit explains.

    Raises
    ------
    ProfileError
        Naming the time, what the links need, and what to check.
    """
    size_bytes, time_s = curve.size_bytes[-1], curve.time_s[-1]
    bound_s = wire_lower_bound_s(cluster, ranks, kind, size_bytes)
    where = f"{kind} of {format_bytes(size_bytes)} over {ranks} ranks in the curve"
    if time_s < CURVE_SLACK * bound_s:
        raise ProfileError(
            f"{where} takes {format_time(time_s)}; the links of {cluster.name} need {format_time(bound_s)}: check the "
            "unit (size_bytes in bytes, time_s in seconds), the ranks and the cluster"
        )
    slow_s = CURVE_SLOW * max(bound_s, 5e-5)
    if time_s > slow_s:
        raise ProfileError(
            f"{where} takes {format_time(time_s)}, {time_s / bound_s:.0f} times what the links need: check the unit "
            "(time_s is in seconds)"
        )
