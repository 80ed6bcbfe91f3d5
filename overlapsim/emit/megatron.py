"""Megatron-LM's arguments of a plan, its environment, and the userbuffer file where tensor parallelism overlaps."""

from __future__ import annotations

from typing import Final

from overlapsim.emit.base import Emitted, Emitter, Subject, comment
from overlapsim.emit.leftovers import arranging_left, host_left, order_left, recipe_left
from overlapsim.emit.megatron_env import QUEUES, Run, env_text, queues
from overlapsim.emit.megatron_layout import put_data_parallel, put_layout, put_pipeline, put_recompute
from overlapsim.emit.megatron_model import put_model
from overlapsim.emit.megatron_options import megatron_options
from overlapsim.emit.megatron_told import DISPATCHERS, TOLD, told_inputs
from overlapsim.emit.rules import FRAMEWORKS, Sheet, Version, words
from overlapsim.emit.transformer_engine import FILE, beside, switches
from overlapsim.emit.userbuffers import userbuffers, yaml_text
from overlapsim.step.inputs import StepInputs
from overlapsim.workload.recipe import RECIPES

ARGUMENTS: Final = "megatron.args"
ENVIRONMENT: Final = "megatron.env"
_ORDER: Final = ("tp", "sp", "cp", "ep", "dp", "pp")
_MAPPED: Final = ("tp", "sp", "cp", "ep", "pp", "dp")


class Megatron(Emitter):
    """Arguments, one a line; data, tokenizer, learning rate and checkpoints are the user's."""

    name = "megatron"
    framework = "megatron"

    def write(self, subject: Subject, version: Version) -> Emitted:
        """Return arguments, environment and userbuffer file."""
        sheet = sheet_of(subject, version)
        run = run_of(subject)
        files = {}
        given = userbuffers(
            subject.entry.operators, subject.layout, Version.parse(FRAMEWORKS["transformer_engine"].newest)
        )
        if given.used:
            for flag in switches(given):
                sheet.set(flag)
            if given.gemms:
                sheet.set("--tp-comm-overlap-cfg", FILE)
                files[FILE] = comment((*self.header(subject, version), *beside(given))) + yaml_text(given.gemms)
        for sentence in given.unexpressed:
            sheet.unsaid(sentence)
        head = (
            *self.header(subject, version),
            f"world_size={subject.layout.world_size}",
            *((f"env {QUEUES}=1",) if queues(run)[0] == "one" else ()),
            "data, tokenizer, learning rate and checkpoints are yours to add",
            *(f"not expressed: {sentence}" for sentence in sheet.unexpressed),
        )
        lines = "".join(f"{flag}{' ' if values else ''}{_quoted(flag, values)}\n" for flag, values in sheet.lines)
        files = {
            ARGUMENTS: comment(head) + lines,
            ENVIRONMENT: comment(self.header(subject, version)) + env_text(run),
            **files,
        }
        return Emitted(files, tuple(sheet.unexpressed))

    def told(self, subject: Subject) -> StepInputs | None:
        """The step without what Megatron cannot be told."""
        return told_inputs(subject)


def _quoted(flag: str, values: tuple[str | int | float | bool, ...]) -> str:
    text = words(values)
    return f'"{text}"' if any(sign in text for sign in "|*()[]") else text


def sheet_of(subject: Subject, version: Version) -> Sheet:
    """All arguments but those of tensor-parallel overlap."""
    sheet = Sheet("Megatron-Core", megatron_options(), version)
    layout, settings = subject.layout, subject.settings
    put_model(sheet, subject.spec, subject.step.inputs.seq_len)
    sheet.set("--bf16" if subject.spec.dtype != "fp16" else "--fp16")
    if settings.fp8:
        sheet.set("--fp8-format", "hybrid")
        sheet.unsaid("which fp8 recipe: Megatron's default (delayed scaling) stands")
    sheet.set("--transformer-impl", "transformer_engine")
    if not RECIPES[subject.step.inputs.recipe].dropout:
        sheet.set("--attention-dropout", 0)
        sheet.set("--hidden-dropout", 0)
    put_layout(sheet, subject)
    put_pipeline(sheet, subject)
    put_data_parallel(sheet, subject)
    put_recompute(sheet, settings)
    _put_experts(sheet, subject)
    for sentence in order_left(subject, "Megatron", _rank_order(sheet)):
        sheet.unsaid(sentence)
    for sentence in arranging_left(subject, "Megatron", TOLD):
        sheet.unsaid(sentence)
    for sentence in recipe_left(subject, "Megatron", DISPATCHERS):
        sheet.unsaid(sentence)
    for sentence in host_left(subject, "Megatron", graphs=False):
        sheet.unsaid(sentence)
    if layout.zero >= 2 and layout.pp > 1:
        sheet.unsaid(
            f"ZeRO {layout.zero} beside a pipeline of {layout.pp}: parameters are gathered in every micro-batch"
        )
    return sheet


def run_of(subject: Subject) -> Run:
    """What the queue count depends on."""
    layout = subject.layout
    pairs = subject.settings.schedule == "interleaved_pairs" and layout.ep > 1
    return Run(layout.tp > 1 or layout.context > 1, layout.zero >= 2, pairs, subject.architecture)


def _rank_order(sheet: Sheet) -> tuple[str, ...]:
    return _MAPPED if any(flag == "--use-tp-pp-dp-mapping" for flag, _ in sheet.lines) else _ORDER


def _put_experts(sheet: Sheet, subject: Subject) -> None:
    """Put down how tokens reach experts, and what runs beside that."""
    settings, layout = subject.settings, subject.layout
    delayed = any(name == "wgrad_delay" and values.get("pending") for name, values in settings.arranging)
    if layout.ep > 1:
        sheet.set("--moe-token-dispatcher-type", DISPATCHERS.get(settings.dispatcher, "alltoall"))
        if settings.dispatcher == "deepep":
            sheet.set("--moe-flex-dispatcher-backend", "deepep")
    if layout.ep > 1 and any(name == "shared_expert" for name, _ in settings.arranging):
        sheet.set("--moe-shared-expert-overlap", why="shared experts run before routed ones")
    paired = settings.schedule == "interleaved_pairs"
    if paired and layout.ep > 1:
        on = sheet.set("--overlap-moe-expert-parallel-comm", why="forwards and backwards are not paired")
        if delayed and on:
            sheet.set("--delay-wgrad-compute")
    elif paired:
        sheet.unsaid("pairs of a forward and a backward without expert parallelism")
    if delayed and not (paired and layout.ep > 1):
        sheet.unsaid("delayed weight gradients: Megatron delays them beside overlapped expert exchanges only")


EMITTER: Final = Megatron()
