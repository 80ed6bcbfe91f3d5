"""Emitters and linters by name, imported when they are asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Final

from overlapsim.emit.base import Emitter
from overlapsim.emit.lint_base import Linter
from overlapsim.errors import UsageError

EMITTERS: Final[Mapping[str, str]] = {
    "megatron": "overlapsim.emit.megatron",
    "transformer_engine": "overlapsim.emit.transformer_engine",
    "megatron_bridge": "overlapsim.emit.megatron_bridge",
    "torchtitan": "overlapsim.emit.torchtitan",
    "pytorch": "overlapsim.emit.pytorch",
    "deepspeed": "overlapsim.emit.deepspeed",
    "nccl": "overlapsim.emit.nccl",
    "vllm": "overlapsim.emit.vllm",
    "sglang": "overlapsim.emit.sglang",
    "wave_group": "overlapsim.emit.wave_group",
}
"""Module that holds `EMITTER`, by name."""
LINTERS: Final[Mapping[str, str]] = {
    "torchtitan": "overlapsim.emit.lint_torchtitan",
    "deepspeed": "overlapsim.emit.lint_deepspeed",
    "megatron": "overlapsim.emit.lint_megatron",
}
"""Module that holds `LINTER`, by name, in the order in which they are asked whose file it is."""


def load_emitter(name: str) -> Emitter:
    """Return one emitter.

    Raises
    ------
    UsageError
        If there is none of the name.
    """
    emitter = importlib.import_module(_module(EMITTERS, name, "target")).EMITTER
    assert isinstance(emitter, Emitter)
    return emitter


def load_linter(name: str) -> Linter:
    """Return one linter.

    Raises
    ------
    UsageError
        If there is none of the name.
    """
    linter = importlib.import_module(_module(LINTERS, name, "linter")).LINTER
    assert isinstance(linter, Linter)
    return linter


def linter_of(file_name: str, text: str) -> Linter:
    """Return the linter that takes a file for its own, by name and content.

    Raises
    ------
    UsageError
        If none does.
    """
    for name in LINTERS:
        linter = load_linter(name)
        if linter.recognises(file_name, text):
            return linter
    raise UsageError(f"{file_name} is a config of none of {', '.join(LINTERS)}; expected one of theirs: say --as NAME")


def check_targets(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of targets, each once.

    Raises
    ------
    UsageError
        If there is none, or one is unknown.
    """
    if not names:
        raise UsageError(f"no target is given; expected --to with some of {', '.join(EMITTERS)}")
    for name in names:
        _module(EMITTERS, name, "target")
    return tuple(dict.fromkeys(names))


def _module(table: Mapping[str, str], name: str, what: str) -> str:
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"{what} {name!r} is unknown; {hint}expected one of {', '.join(table)}")
    return table[name]
