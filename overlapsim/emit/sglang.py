"""Flags of an SGLang server with a plan's degrees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from overlapsim.emit.base import Emitted, Emitter, Subject, comment
from overlapsim.emit.rules import Flag, Sheet, Version
from overlapsim.emit.serving import args_text, training_left, weights_open
from overlapsim.errors import PlanError

FILE: Final = "sglang.args"
START: Final = f"python -m sglang.launch_server $(grep -v '^#' {FILE})"
FLAGS: Final[Mapping[str, Flag]] = {
    "model": Flag("--model-path"),
    "tp": Flag("--tp-size"),
    "pp": Flag("--pp-size"),
    "dp": Flag("--dp-size"),
    "cp": Flag("--attn-cp-size"),
    "ep": Flag("--ep-size"),
    "attention_dp": Flag("--enable-dp-attention", "switch"),
    "backend": Flag("--moe-a2a-backend", choices=("none", "deepep", "mooncake", "mori", "nixl", "flashinfer")),
    "mode": Flag("--deepep-mode", choices=("auto", "normal", "low_latency")),
    "pairs": Flag("--enable-two-batch-overlap", "switch"),
}
"""By neutral name (SGLang 0.5.23, tried with its parser)."""


class Sglang(Emitter):
    """SGLang, from plans of training steps."""

    name = "sglang"
    framework = "sglang"

    def write(self, subject: Subject, version: Version) -> Emitted:
        """Return the flags, one a line.

        In SGLang ``--tp-size`` counts the ranks of a stage of one server: with
        data-parallel attention they are dealt to ``--dp-size`` groups, and
        experts to all; without, there are ``--dp-size`` servers.

        Raises
        ------
        PlanError
            If heads are split over Ulysses ranks.
        """
        layout = subject.layout
        if layout.sp > 1:
            raise PlanError(f"SGLang does not split heads over sp={layout.sp} (Ulysses); plan with sp=1")
        sheet = Sheet("SGLang", FLAGS, version)
        sheet.set("model", subject.spec.name)
        stage = layout.world_size // layout.pp
        spread = layout.ep > 1
        sheet.set("tp", stage if spread else layout.tp * layout.cp)
        sheet.set("pp", layout.pp)
        sheet.set("dp", layout.dp)
        if layout.cp > 1:
            sheet.set("cp", layout.cp)
        if spread:
            _experts(subject, sheet, stage)
        for sentence in _left(subject):
            sheet.unsaid(sentence)
        return Emitted(
            {FILE: comment((*self.header(subject, version), START)) + args_text(sheet)},
            tuple(sheet.unexpressed),
            weights_open(subject),
        )


def _experts(subject: Subject, sheet: Sheet, stage: int) -> None:
    layout = subject.layout
    sheet.set("ep", stage)
    if layout.dp > 1:
        sheet.set("attention_dp")
    sheet.set("backend", "deepep")
    sheet.set("mode", "auto")
    if layout.ep != stage:
        sheet.unsaid(f"SGLang's DeepEP deals experts to all {stage} ranks of a stage; the plan has ep={layout.ep}")
    if subject.settings.schedule in ("dualpipe", "dualpipev", "interleaved_pairs"):
        sheet.set("pairs")


def _left(subject: Subject) -> Iterator[str]:
    layout = subject.layout
    yield from training_left(subject, "SGLang")
    if layout.tp > 1 and layout.sequence_parallel:
        yield "SGLang adds up over tensor-parallel ranks; the plan splits norms along the sequence"


EMITTER = Sglang()
