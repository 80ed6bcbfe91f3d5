"""The spec of a sweep: YAML that says which question is asked, for which values, as a grid and as single points."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from overlapsim import __version__
from overlapsim.errors import UsageError
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.profile import Cluster
from overlapsim.plan import Finding
from overlapsim.planner.step_plan import model_digest
from overlapsim.strict_yaml import YamlFaultError, parse
from overlapsim.sweep.keys import REQUIRED, Cell, Key, read_value
from overlapsim.sweep.kinds import KINDS, Kind
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.presets import load_model

TOP_KEYS: Final = ("kind", "command", "common", "grid", "points")
MOST_POINTS: Final = 200_000
"""A point takes 10 ms or more, so this is hours of work; a larger grid is a slip."""
_FORM: Final = "expected kind: sweep, command, and points in common, grid and points (docs/sweep.md)"


@dataclass(frozen=True)
class Point:
    """One question of a sweep.

    Attributes
    ----------
    id : digest of all that its answer depends on: values, contents of the profile and of the model, version
    values : in the order of the kind's keys, defaults filled in
    """

    id: str
    values: tuple[Cell, ...]


@dataclass(frozen=True, eq=False)
class Sweep:
    """All questions of a spec.

    Attributes
    ----------
    kind : which question
    points : each once, in the order of the spec: single points after the grid
    repeated : how often a point was given again
    clusters, models : by the name that points have; nodes are not counted yet
    model_sha256 : digest of what each model is
    findings : what was assumed of models that are frameworks' configurations
    """

    kind: Kind
    points: tuple[Point, ...]
    repeated: int
    clusters: Mapping[str, Cluster]
    models: Mapping[str, ModelSpec] = field(default_factory=dict)
    model_sha256: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def given(self, point: Point) -> dict[str, Cell]:
        """Values of a point by key."""
        return {key.name: value for key, value in zip(self.kind.keys, point.values, strict=True)}

    def digests(self, point: Point) -> tuple[str, ...]:
        """Cells behind the values of a point: what it was computed from."""
        given = self.given(point)
        of_model = (self.model_sha256[str(given["model"])],) if self.kind.has_model else ()
        return (self.clusters[str(given["cluster"])].digest, *of_model, __version__)


def read_sweep(path: str | Path) -> Sweep:
    """Read a spec; profiles and models named by a path are looked for from here, then from the spec's folder.

    Raises
    ------
    UsageError
        If the file cannot be read, is no spec, or has a value that its command does not take.
    ProfileError, WorkloadError
        If a cluster or model is unknown or malformed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"cannot read sweep {path}: there is no such file; expected a spec (YAML)") from None
    except UnicodeDecodeError:
        raise UsageError(f"cannot read sweep {path}: it is not text; expected a spec (YAML)") from None
    except OSError as error:
        raise UsageError(f"cannot read sweep {path}: {error.strerror}; expected a spec (YAML)") from None
    return parse_sweep(text, str(path), Path(path).parent)


def parse_sweep(text: str, name: str = "sweep", folder: Path | None = None) -> Sweep:
    """Build a sweep from the text of a spec; errors as `read_sweep`.

    Parameters
    ----------
    text : YAML
    name : file name, for messages
    folder : where paths are looked for too

    Examples
    --------
    >>> common = "{cluster: a100-sxm8, ranks: 4, n: 4096, k: 4096}"
    >>> text = f"{{kind: sweep, command: operator, common: {common}, grid: {{m: [1024, 2048]}}}}"
    >>> [point.values[3] for point in parse_sweep(text).points]
    [1024, 2048]
    """
    try:
        content = parse(text)
    except YamlFaultError as fault:
        raise UsageError(f"sweep {name} is not YAML: {fault}; {_FORM}") from None
    if not isinstance(content, dict) or content.get("kind") != "sweep":
        raise UsageError(f"sweep {name} is {'empty' if content is None else 'no spec of a sweep'}; {_FORM}")
    try:
        return _sweep(content, folder)
    except UsageError as error:
        raise UsageError(f"sweep {name}: {error}") from None


def _sweep(content: Mapping[str, Any], folder: Path | None) -> Sweep:
    _refuse_unknown(content, TOP_KEYS, "")
    command = content.get("command")
    if not isinstance(command, str) or command not in KINDS:
        raise UsageError(f"command is {command!r}; expected one of {', '.join(KINDS)}")
    kind = KINDS[command]
    combinations = list(_combinations(content, kind))
    clusters = {name: load_cluster(_beside(name, folder)) for name in _names(kind, combinations, "cluster")}
    loaded = {name: load_model(_beside(name, folder)) for name in _names(kind, combinations, "model")}
    models = {name: model for name, (model, _) in loaded.items()}
    digests = {name: model_digest(model) for name, model in models.items()}
    findings = tuple(
        Finding(finding.code, f"{name}: {finding.message}") for name, (_, found) in loaded.items() for finding in found
    )
    sweep = Sweep(kind, (), 0, clusters, models, digests, findings)
    points: dict[str, Point] = {}
    for values in combinations:
        point = Point("", values)
        # Contents stand for names here: a file that moved is the same point, one that changed is another.
        named = {**sweep.given(point), "cluster": "", "model": ""}
        key = msgspec.json.encode([command, sorted(named.items()), sweep.digests(point)])
        found = Point(hashlib.sha256(key).hexdigest()[:20], values)
        points.setdefault(found.id, found)
    ordered = tuple(points.values())
    return Sweep(kind, ordered, len(combinations) - len(ordered), clusters, models, digests, findings)


def _combinations(content: Mapping[str, Any], kind: Kind) -> Iterator[tuple[Cell, ...]]:
    """Values of each point in the order of the keys: the grid's, its last key fastest, then the single points'."""
    keys = {key.name: key for key in kind.keys}
    common = _section(content.get("common", {}), "common", keys)
    axes: dict[str, list[Cell]] = {}
    for name, values in _mapping(content.get("grid", {}), "grid", keys).items():
        if name in common:
            raise UsageError(f"{name} stands in common and in grid; give it in one of them")
        if not isinstance(values, list) or not values:
            raise UsageError(f"grid.{name} is {values!r}; expected a list of values")
        axes[name] = [read_value(keys[name], value, f"grid.{name}[{at}]") for at, value in enumerate(values)]
    singles = content.get("points", [])
    if not isinstance(singles, list):
        raise UsageError(f"points is {singles!r}; expected a list of points, each a mapping")
    if not axes and not singles:
        raise UsageError("there are no points; expected grid, points or both")
    count = math.prod(len(values) for values in axes.values()) * bool(axes) + len(singles)
    if count > MOST_POINTS:
        raise UsageError(f"there are {count:,} points; expected at most {MOST_POINTS:,}: split the sweep")
    if axes:
        _require(kind.keys, {*common, *axes}, "grid")
        for combination in itertools.product(*axes.values()):
            yield _complete(kind.keys, {**common, **dict(zip(axes, combination, strict=True))})
    for at, single in enumerate(singles):
        own = _section(single, f"points[{at}]", keys)
        _require(kind.keys, {*common, *own}, f"points[{at}]")
        yield _complete(kind.keys, {**common, **own})


def _section(given: Any, name: str, keys: Mapping[str, Key]) -> dict[str, Cell]:
    """Values of a mapping from keys to one value each."""
    found = _mapping(given, name, keys)
    for key, value in found.items():
        if isinstance(value, list | dict):
            raise UsageError(f"{name}.{key} is {value!r}; expected one value (lists of values stand in grid)")
    return {key: read_value(keys[key], value, f"{name}.{key}") for key, value in found.items()}


def _mapping(given: Any, name: str, keys: Mapping[str, Key]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise UsageError(f"{name} is {given!r}; expected a mapping with keys such as {', '.join(list(keys)[:4])}")
    _refuse_unknown(given, tuple(keys), f"{name}.")
    return given


def _refuse_unknown(given: Mapping[Any, Any], allowed: Sequence[str], where: str) -> None:
    for key in given:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(allowed)}"
            raise UsageError(f"unknown key {where}{key}; {hint}")


def _require(keys: Sequence[Key], given: set[str], where: str) -> None:
    missing = [key.name for key in keys if key.default is REQUIRED and key.name not in given]
    if missing:
        raise UsageError(f"{where} has no {', '.join(missing)}; give them there or in common")


def _complete(keys: Sequence[Key], given: Mapping[str, Cell]) -> tuple[Cell, ...]:
    return tuple(given.get(key.name, key.default) for key in keys)


def _names(kind: Kind, combinations: Sequence[tuple[Cell, ...]], key: str) -> tuple[str, ...]:
    """Distinct values of one key, in order."""
    at = next((at for at, known in enumerate(kind.keys) if known.name == key), None)
    return () if at is None else tuple(dict.fromkeys(str(values[at]) for values in combinations))


def _beside(name: str, folder: Path | None) -> str:
    """A path that leads nowhere from here, from the spec's folder; names stay names."""
    is_path = "/" in name or name.endswith((".yaml", ".yml", ".json"))
    if folder is None or not is_path or Path(name).exists() or not (folder / name).exists():
        return name
    return str(folder / name)
