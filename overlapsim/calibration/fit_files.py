"""Fits as the YAML that profiles read (``hwprofiles/README.md``): one file a family and device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from overlapsim.hardware.profile import Fit

# Units by the end of a constant's name; anything else is a plain ratio, or a count for sizes.
_UNITS: Final = (("_bytes_per_s", "B/s"), ("_s", "s"))
_COUNTS: Final = ("_low", "_high", "diagonal", "_rows")
DIGITS: Final = 4
"""Significant digits kept: a tenth of a per mille, far below any residual."""


def fit_document(owner: str, fits: Sequence[Fit], notes: str = "") -> dict[str, Any]:
    """Content of ``fits/<family>/<owner>.yaml``, ready for a YAML writer.

    Parameters
    ----------
    owner : device or cluster that the fits belong to
    fits : all of one family
    notes : of the file
    """
    families = {fit.family for fit in fits}
    assert len(families) == 1, "one family a file"
    header: dict[str, Any] = {"kind": "fit", "family": families.pop(), "of": owner}
    if notes:
        header["notes"] = notes
    return {**header, "fits": {fit.key: _entry(fit) for fit in fits}}


def fit_text(owner: str, fits: Sequence[Fit], notes: str = "") -> str:
    """`fit_document` as YAML text."""
    import yaml

    text: str = yaml.safe_dump(fit_document(owner, fits, notes), sort_keys=False, width=118, allow_unicode=True)
    return text


def _entry(fit: Fit) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "source": fit.source.reference,
        "layer": fit.source.layer,
        "trust": fit.source.trust,
        "num_points": fit.num_points,
    }
    if fit.notes:
        entry["notes"] = fit.notes
    if fit.spread:
        entry["spread"] = {regime: [round(end, 3) for end in ends] for regime, ends in fit.spread.items()}
    entry["parameters"] = _parameters(fit.parameters)
    return entry


def _parameters(parameters: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    return {name: {"value": _rounded(value), "unit": _unit(name)} for name, value in parameters.items()}


def _unit(name: str) -> str:
    if name.endswith(_COUNTS):
        return "count"
    return next((unit for suffix, unit in _UNITS if name.endswith(suffix)), "ratio")


def _rounded(value: float) -> float | int:
    return int(value) if float(value).is_integer() and abs(value) < 1e15 else float(f"{value:.{DIGITS}g}")
