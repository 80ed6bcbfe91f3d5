"""Transformer Engine's userbuffer file (``--tp-comm-overlap-cfg``) of a plan."""

from __future__ import annotations

from typing import Final

from overlapsim.emit.base import Emitted, Emitter, Subject, comment
from overlapsim.emit.rules import Version
from overlapsim.emit.userbuffers import Userbuffers, userbuffers, yaml_text

FILE: Final = "tp_comm_overlap.yaml"
SWITCHES: Final = (
    ("gather", "--disable-tp-comm-overlap-ag"),
    ("scatter", "--disable-tp-comm-overlap-rs"),
    ("bulk_dgrad", "--disable-tp-comm-bulk-dgrad"),
    ("bulk_wgrad", "--disable-tp-comm-bulk-wgrad"),
)
"""Kind of overlap, and Megatron's flag that switches it off."""


class TransformerEngine(Emitter):
    """The file, with the switches that must stand beside it in its head."""

    name = "transformer_engine"
    framework = "transformer_engine"

    def write(self, subject: Subject, version: Version) -> Emitted:
        """Return the file; empty of GEMMs where the plan overlaps none of them."""
        layout = subject.layout
        given = userbuffers(subject.entry.operators, layout, version)
        lines = (*self.header(subject, version), *beside(given))
        return Emitted({FILE: comment(lines) + yaml_text(given.gemms)}, given.unexpressed)


def beside(given: Userbuffers) -> tuple[str, ...]:
    """What must stand beside the file on Megatron's command line, for its head."""
    flags = " ".join(switches(given))
    return (f"beside it: {flags}",) if given.used else ("nothing is overlapped: leave --tp-comm-overlap out",)


def switches(given: Userbuffers) -> tuple[str, ...]:
    """Megatron's flags for the kinds of overlap."""
    off = tuple(flag for kind, flag in SWITCHES if not getattr(given, kind))
    if given.scatter_with_dgrad:
        off = (*(flag for flag in off if "bulk" not in flag), "--tp-comm-overlap-rs-dgrad")
    return ("--tp-comm-overlap", *off)


EMITTER: Final = TransformerEngine()
