"""Flags of a vLLM server with a plan's degrees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from overlapsim.emit.base import Emitted, Emitter, Subject, comment
from overlapsim.emit.rules import Flag, Sheet, Version
from overlapsim.emit.serving import args_text, has_experts, training_left, weights_open
from overlapsim.errors import PlanError

FILE: Final = "vllm.args"
_BACKENDS: Final = (
    *("allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency", "deepep_v2", "nixl_ep"),
    *("mori_high_throughput", "mori_low_latency", "flashinfer_nvlink_two_sided", "flashinfer_nvlink_one_sided"),
)
START: Final = f"python -m vllm.entrypoints.openai.api_server $(grep -v '^#' {FILE})"
FLAGS: Final[Mapping[str, Flag]] = {
    "model": Flag("--model"),
    "tp": Flag("--tensor-parallel-size"),
    "pp": Flag("--pipeline-parallel-size"),
    "dp": Flag("--data-parallel-size"),
    "cp": Flag("--prefill-context-parallel-size"),
    "experts": Flag("--enable-expert-parallel", "switch"),
    "backend": Flag("--all2all-backend", choices=_BACKENDS),
    "pairs": Flag("--enable-dbo", "switch"),
}
"""By neutral name (vLLM 0.33.0, tried with its parser)."""


class Vllm(Emitter):
    """vLLM, from plans of training steps."""

    name = "vllm"
    framework = "vllm"

    def write(self, subject: Subject, version: Version) -> Emitted:
        """Return the flags, one a line.

        Raises
        ------
        PlanError
            If heads are split over Ulysses ranks, or a context is split together with data-parallel ranks.
        """
        layout = subject.layout
        if layout.sp > 1:
            raise PlanError(f"vLLM does not split heads over sp={layout.sp} (Ulysses); plan with sp=1")
        sheet = Sheet("vLLM", FLAGS, version)
        sheet.set("model", subject.spec.name)
        sheet.set("tp", layout.tp)
        sheet.set("pp", layout.pp)
        if layout.cp > 1:
            sheet.set("cp", layout.cp)
        if layout.cp > 1 and layout.dp > 1:
            sheet.unsaid(
                f"vLLM splits contexts without data-parallel ranks: the plan's dp={layout.dp} are so many servers"
            )
        else:
            sheet.set("dp", layout.dp)
        if layout.ep > 1:
            _experts(subject, sheet)
        for sentence in _left(subject):
            sheet.unsaid(sentence)
        return Emitted(
            {FILE: comment((*self.header(subject, version), START)) + args_text(sheet)},
            tuple(sheet.unexpressed),
            weights_open(subject),
        )


def _experts(subject: Subject, sheet: Sheet) -> None:
    layout = subject.layout
    sheet.set("experts")
    whole = layout.tp * layout.cp * layout.dp
    if layout.ep != whole:
        sheet.unsaid(f"vLLM deals experts to all {whole} ranks of tp, cp and dp; the plan has ep={layout.ep}")
    # Two micro-batches beside each other take DeepEP; with anything else vLLM refuses them.
    if subject.settings.schedule in ("dualpipe", "dualpipev", "interleaved_pairs") and layout.dp > 1:
        sheet.set("backend", "deepep_high_throughput")
        sheet.set("pairs")


def _left(subject: Subject) -> Iterator[str]:
    layout = subject.layout
    yield from training_left(subject, "vLLM")
    if layout.tp > 1 and layout.sequence_parallel:
        yield "vLLM 0.33 has no sequence parallelism and no async tensor parallelism: all-reduces stand alone"
    if layout.ep == 1 and has_experts(subject) and layout.etp != layout.tp:
        yield f"vLLM splits experts as tp={layout.tp} where they are not dealt out; the plan has etp={layout.etp}"


EMITTER = Vllm()
