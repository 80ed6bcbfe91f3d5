"""A calibrated profile as files: a cluster that extends its base, its curves and fits beside it, records and report."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import yaml

from overlapsim.calibration.fit import REFERENCE, Calibration
from overlapsim.calibration.fit_contention import Slowdown
from overlapsim.calibration.fit_curve import CurveFit
from overlapsim.calibration.own_base import base_overlay
from overlapsim.calibration.records import RecordSet, dump_records
from overlapsim.calibration.report import report_of
from overlapsim.errors import UsageError
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.profile import Fit, Source

REPORT: Final = "report.json"
MARK: Final = "overlapsim_calibration"
"""Key of the report by which a folder is known as an earlier result, which may be replaced."""


def check_folder(folder: Path) -> None:
    """Whether a result can be put at `folder`: ask before long work.

    Raises
    ------
    UsageError
        If it is a file, its parent is missing, or it holds anything but an earlier result.
    """
    if not folder.parent.is_dir():
        raise UsageError(f"cannot write {folder}: the folder {folder.parent} does not exist; create it first")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; expected a folder to write the profile to")
    if any(folder.iterdir()) and not _is_result(folder):
        raise UsageError(f"{folder} holds other files; give a new or empty folder, or one of an earlier calibration")


def write_profile(calibration: Calibration, folder: Path) -> Path:
    """Write the profile, usable as ``--cluster FOLDER``.

    All files are written beside `folder` first, loaded as a check, and put in place by a rename, so that a reader
    sees the earlier result or the new one.

    Parameters
    ----------
    calibration : with at least one accepted part
    folder : new, empty, or an earlier result

    Returns
    -------
    Path
        The cluster's YAML file.

    Raises
    ------
    UsageError
        If the folder cannot be written.
    """
    check_folder(folder)
    name = profile_name(calibration.base_name)
    try:
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}; choose another folder") from None
    try:
        for file, content in _files(calibration, name).items():
            target = part / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        # What was written must load: a profile that does not would be found out by the next command only.
        load_cluster(str(part))
        part.chmod(0o755)
        _swap(part, folder)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}; choose another folder") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder / f"{name}.yaml"


def profile_name(base_name: str) -> str:
    """Name of the calibrated cluster: its base's with ``-calibrated`` behind.

    Examples
    --------
    >>> profile_name("h100-sxm8"), profile_name("out/h100-sxm8-calibrated")
    ('h100-sxm8-calibrated', 'h100-sxm8-calibrated')
    """
    stem = Path(base_name).name.removesuffix(".yaml").removesuffix(".yml")
    return stem if stem.endswith("-calibrated") else f"{stem}-calibrated"


def _swap(part: Path, folder: Path) -> None:
    if not folder.exists():
        part.rename(folder)
        return
    old = part.with_suffix(".old")
    folder.rename(old)
    try:
        part.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _is_result(folder: Path) -> bool:
    with suppress(OSError, ValueError):
        return MARK in json.loads((folder / REPORT).read_text(encoding="utf-8"))
    return False


def _files(calibration: Calibration, name: str) -> dict[str, bytes]:
    overlay, files = base_overlay(calibration.base_name)
    profile: dict[str, Any] = {
        "kind": "cluster",
        "notes": f"calibrated on {len(calibration.records)} records; figures and what was left out: {REPORT}",
        **overlay,
        "calibrated": True,
    }
    curves = dict(profile.get("curves", {}))
    for curve in calibration.curves:
        if curve.accepted:
            file = f"{curve.key.collective}_{curve.key.ranks}_{curve.key.nodes}.csv"
            files[f"tables/{file}"] = _table(curve)
            short = f"{curve.key.collective}/{curve.key.ranks}"
            key = short if curve.key.nodes == 1 else f"{short}/{curve.key.nodes}"
            if curve.key.nodes == 1:
                # A single node may be spelt out; both spellings must not stand side by side.
                curves.pop(f"{short}/1", None)
            curves[key] = {"file": file, "source": REFERENCE, "layer": "measured", "trust": "high"}
    if curves:
        profile["curves"] = curves
    _add_fits(calibration, profile, files, name)
    files[f"{name}.yaml"] = _yaml(profile)
    kept = RecordSet(calibration.records, calibration.header)
    files[REFERENCE] = dump_records(kept).encode()
    files[REPORT] = (json.dumps({MARK: 1, **report_of(calibration)}, indent=2) + "\n").encode()
    return files


def _add_fits(calibration: Calibration, profile: dict[str, Any], files: dict[str, bytes], name: str) -> None:
    by_family: dict[str, list[Fit]] = {}
    kernels = (kernel.fit for kernel in calibration.kernels if kernel.accepted)
    for fit in (*kernels, *map(_contention_fit, calibration.contention)):
        if fit is not None:
            by_family.setdefault(fit.family, []).append(fit)
    device = calibration.base.device.name
    if by_family:
        node = _section(profile, "node", calibration.base.node.name)
        _list_fits(_section(node, "device", device), by_family, device, files)
    if calibration.structural is not None and calibration.structural.accepted:
        _list_fits(profile, {"collective": [calibration.structural.fit]}, name, files)


def _list_fits(
    profile: dict[str, Any], by_family: Mapping[str, list[Fit]], owner: str, files: dict[str, bytes]
) -> None:
    listed = list(profile.get("fits", []))
    for family, fits in sorted(by_family.items()):
        file = f"{family}_{owner}.yaml"
        files[f"fits/{file}"] = _fit_file(family, owner, fits)
        listed += [file] if file not in listed else []
    profile["fits"] = listed


def _contention_fit(slowdown: Slowdown) -> Fit:
    ends = (min(1.0, slowdown.low / slowdown.median), max(1.0, slowdown.high / slowdown.median))
    return Fit(
        "contention",
        slowdown.key,
        {"slowdown": slowdown.median},
        Source("measured", REFERENCE, "high"),
        slowdown.num_points,
        {"all": ends},
        f"{slowdown.op} beside {slowdown.concurrent} over its price alone",
    )


def _section(profile: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    """The profile below `key` as a mapping: one that is only named is extended in place."""
    value = profile.get(key, name)
    section = {"extends": value} if isinstance(value, str) else dict(value)
    profile[key] = section
    return section


def _table(curve: CurveFit) -> bytes:
    lines = ["size_bytes,time_s", *(f"{point.size_bytes},{point.time_s!r}" for point in curve.points)]
    return ("\n".join(lines) + "\n").encode()


def _fit_file(family: str, of: str, fits: Iterable[Fit]) -> bytes:
    entries = {fit.key: _fit_entry(fit) for fit in fits}
    return _yaml({"kind": "fit", "family": family, "of": of, "fits": entries})


def _fit_entry(fit: Fit) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "source": fit.source.reference,
        "layer": fit.source.layer,
        "trust": fit.source.trust,
        "num_points": fit.num_points,
        "parameters": {name: {"value": _rounded(value), "unit": _unit(name)} for name, value in fit.parameters.items()},
    }
    if fit.spread:
        entry["spread"] = {regime: [_rounded(low), _rounded(high)] for regime, (low, high) in fit.spread.items()}
    if fit.notes:
        entry["notes"] = fit.notes
    return entry


def _unit(name: str) -> str:
    """Unit of a parameter by its name; structural constants of collectives name none."""
    if name.endswith("_bytes_per_s") or name.endswith("_rate"):
        return "B/s"
    if name.endswith("_flop_per_s"):
        return "FLOP/s"
    if name.endswith(("_bytes", "_onset")):
        return "B"
    return "s" if name.endswith(("_s", "_base", "_hop", "_root")) else "ratio"


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _yaml(content: Mapping[str, Any]) -> bytes:
    return yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=120).encode()
