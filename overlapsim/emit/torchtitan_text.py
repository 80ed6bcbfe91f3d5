"""Text of torchtitan's two dialects from one sheet of settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from overlapsim.emit.base import Subject, comment
from overlapsim.emit.rules import Scalar, Sheet
from overlapsim.emit.torchtitan_models import FLAVORS

_PARTS: Final = "module_fqns_per_model_part"
_LISTS: Final = (_PARTS, "components", "converters")
_POLICIES: Final = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}

Sections = Mapping[str, Mapping[str, Scalar | list[Scalar] | list[list[str]]]]


def sections(lines: Sequence[tuple[str, tuple[Scalar, ...]]]) -> Sections:
    """Settings by section, in the order in which they came.

    Examples
    --------
    >>> sections([("compile.enable", (True,)), ("compile.components", ("model", "loss"))])
    {'compile': {'enable': True, 'components': ['model', 'loss']}}
    """
    found: dict[str, dict[str, Scalar | list[Scalar] | list[list[str]]]] = {}
    for spelling, values in lines:
        section, _, key = spelling.rpartition(".")
        value: Scalar | list[Scalar] | list[list[str]]
        if key == _PARTS:
            value = [str(part).split() for part in values]
        else:
            value = list(values) if key in _LISTS else values[0]
        found.setdefault(section, {})[key] = value
    return found


def toml_text(sheet: Sheet, head: tuple[str, ...]) -> str:
    """A TOML file for ``--job.config_file``."""
    parts = [comment(head)]
    for section, content in sections(sheet.lines).items():
        rows = "".join(f"{key} = {json.dumps(value)}\n" for key, value in content.items())
        parts.append(f"[{section}]\n{rows}")
    return "\n".join(parts)


def python_text(sheet: Sheet, head: tuple[str, ...], subject: Subject) -> str:
    """A module for ``--module torchtitan_plan --config plan``, whose function returns a ``Trainer.Config``."""
    found = sections(sheet.lines)
    known = FLAVORS.get(subject.step.inputs.model)
    policy = _POLICIES[str(found["activation_checkpoint"]["mode"])]
    titan = ["CompileConfig", "ParallelismConfig"] if "compile" in found else ["ParallelismConfig"]
    text = [f'"""{head[0]}.\n\n' + "".join(f"{line}\n" for line in head[1:])]
    text.append('\nStart with ``--module torchtitan_plan --config plan`` from this folder.\n"""\n\n')
    text.append(f"from torchtitan.config import {', '.join(titan)}\n")
    if policy != "None":
        text.append(f"from torchtitan.distributed.activation_checkpoint import {policy.split('.')[0]}\n")
    if known is not None and known.function:
        text.append(f"from torchtitan.models.{known.name}.config_registry import {known.function} as base\n")
    else:
        text.append(
            "\n\ndef base():\n"
            '    """Return the Trainer.Config of the model, whatever its degrees."""\n'
            f'    raise NotImplementedError("name the config function of {subject.spec.name} here")\n'
        )
    text.append("\n\ndef plan():\n    config = base()\n")
    text += [f"    config.training.{key} = {value!r}\n" for key, value in found["training"].items()]
    text.append(_call("parallelism", "ParallelismConfig", found["parallelism"]))
    if "compile" in found:
        text.append(_call("compile", "CompileConfig", found["compile"]))
    text.append(f"    config.activation_checkpoint = {policy}\n    return config\n")
    return "".join(text)


def _call(section: str, kind: str, content: Mapping[str, object]) -> str:
    rows = "".join(
        f"        {key}={json.dumps(value) if _long(value) else repr(value)},\n" for key, value in content.items()
    )
    return f"    config.{section} = {kind}(\n{rows}    )\n"


def _long(value: object) -> bool:
    return isinstance(value, str | list)
