"""Models by name: the presets that ship, a model file of one's own, or a framework's ``config.json``."""

from __future__ import annotations

import difflib
import importlib.resources
import os
import textwrap
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

from overlapsim.errors import WorkloadError
from overlapsim.plan import Finding
from overlapsim.workload.hf_config import parse_config
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.model_file import parse_model

CONFIG_NAME: Final = "config.json"


def list_presets() -> tuple[str, ...]:
    """Names of the models that ship, sorted."""
    names = (entry.name for entry in _folder().iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def load_preset(name: str) -> ModelSpec:
    """Load a model that ships.

    Raises
    ------
    WorkloadError
        If there is none of that name: the message lists near names and what exists.

    Examples
    --------
    >>> load_preset("llama3-8b").num_layers
    32
    """
    names = list_presets()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        listed = textwrap.fill(f"there are: {', '.join(names)}", 100, subsequent_indent="  ", break_on_hyphens=False)
        raise WorkloadError(f"model {name!r} is unknown; {hint}expected a preset or a file\n{listed}")
    return parse_model((_folder() / f"{name}.yaml").read_text(encoding="utf-8"), name)


def load_model(name: str | Path) -> tuple[ModelSpec, tuple[Finding, ...]]:
    """Load a model by what a user calls it.

    Parameters
    ----------
    name : a preset, which goes before a file of the same name; or the path of a model file (``.yaml``), of a
        framework's configuration (``.json``), or of the folder that holds its ``config.json``

    Returns
    -------
    model : ModelSpec
    findings : tuple of Finding
        What was assumed, or stands in a configuration and is not modelled; none for presets and model files.

    Raises
    ------
    WorkloadError
        If there is no such preset or file, it cannot be read, or it describes no valid model.

    Examples
    --------
    >>> model, findings = load_model("deepseek-v3")
    >>> model.num_layers, findings
    (61, ())
    """
    path, text = Path(name), str(name)
    if isinstance(name, str) and (text in list_presets() or not (_is_path(text) or os.path.exists(text))):  # noqa: PTH110
        return load_preset(text), ()
    if os.path.isdir(path):  # noqa: PTH112  (unlike Path.is_dir it holds for any text)
        path = path / CONFIG_NAME
    text = _read(path)
    if path.suffix == ".json":
        return parse_config(text, str(path), _title(path))
    return parse_model(text, str(path)), ()


def _is_path(text: str) -> bool:
    return text.endswith((".json", ".yaml", ".yml")) or "/" in text or os.sep in text


def _title(path: Path) -> str:
    """Name of a model in a configuration: its file's, or its folder's where the file has the name all have."""
    return path.parent.resolve().name if path.name == CONFIG_NAME else path.stem


def _read(path: Path) -> str:
    expected = "expected a preset's name, a model file (YAML) or a config.json"
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise WorkloadError(f"cannot read model {path}: there is no such file; {expected}") from None
    except UnicodeDecodeError:
        raise WorkloadError(f"cannot read model {path}: it is not UTF-8 text; {expected}") from None
    except OSError as error:
        raise WorkloadError(f"cannot read model {path}: {error.strerror}; {expected}") from None


def _folder() -> Traversable:
    return importlib.resources.files("overlapsim") / "models"
