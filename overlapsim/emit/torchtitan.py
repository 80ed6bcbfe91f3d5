"""Settings for torchtitan: TOML up to 0.2.2, a Python config from 0.3.0 on, a schedule file where torch needs one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from overlapsim.emit.base import Emitted, Emitter, Subject
from overlapsim.emit.leftovers import (
    arranging_left,
    host_left,
    order_left,
    recipe_left,
    recompute_left,
    strategies_left,
)
from overlapsim.emit.rules import Sheet, Version
from overlapsim.emit.torch_schedules import schedule_class, schedule_file, splits_backward
from overlapsim.emit.torchtitan_flags import FLAGS, LAST_TOML, settled
from overlapsim.emit.torchtitan_models import FLAVORS, Flavor, chunk_layers, stage_modules
from overlapsim.emit.torchtitan_text import python_text, toml_text
from overlapsim.errors import PlanError
from overlapsim.plan import Finding
from overlapsim.workload.model import MoE

SCHEDULE_FILE: Final = "torchtitan_schedule.csv"
_ORDER: Final = ("tp", "cp", "dp", "pp")
_FIRST_FILE: Final = "torchtitan.toml"
_MODULE: Final = "torchtitan_plan.py"


class Torchtitan(Emitter):
    """torchtitan, from plans of training steps."""

    name = "torchtitan"
    framework = "torchtitan"

    def write(self, subject: Subject, version: Version) -> Emitted:
        """Return the config of one dialect, and the schedule's actions where torch has no name for them.

        Raises
        ------
        PlanError
            If torchtitan cannot run the layout or the schedule.
        """
        version = settled(version)
        _check(subject, version)
        sheet = Sheet("torchtitan", FLAGS, version)
        _model(subject, sheet)
        _batch(subject, sheet)
        _data_parallel(subject, sheet)
        _inner_degrees(subject, sheet)
        _pipeline(subject, sheet)
        _kernels(subject, sheet)
        _recompute(subject, sheet)
        for sentence in _left(subject, version):
            sheet.unsaid(sentence)
        head = self.header(subject, version)
        toml = version <= LAST_TOML
        files = {_FIRST_FILE: toml_text(sheet, head)} if toml else {_MODULE: python_text(sheet, head, subject)}
        actions = schedule_file(subject.settings, subject.layout.pp, subject.layout.vpp)
        if actions is not None:
            files[SCHEDULE_FILE] = actions
        return Emitted(files, tuple(sheet.unexpressed), tuple(_findings(subject, version)))


def _check(subject: Subject, version: Version) -> None:
    """Refuse what torchtitan would refuse at its start, or run as another layout."""
    layout, seq_len = subject.layout, subject.step.inputs.seq_len
    if layout.sp > 1:
        raise PlanError(
            f"the plan splits heads over sp={layout.sp} (Ulysses), which torchtitan has not; plan with sp=1"
        )
    divisor = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    if seq_len % divisor:
        raise PlanError(f"torchtitan splits sequences into tp x 2 cp = {divisor} parts; {seq_len} tokens do not divide")
    if layout.ep > 1 and (layout.etp not in (1, layout.tp) or (layout.etp > 1 and version > LAST_TOML)):
        raise PlanError(
            f"torchtitan {version} keeps experts whole{' or splits them as tp' if version <= LAST_TOML else ''}; the "
            f"plan has etp={layout.etp} with tp={layout.tp}: plan with etp=1"
        )


def _model(subject: Subject, sheet: Sheet) -> None:
    if sheet.version > LAST_TOML:
        return
    # An unknown name makes torchtitan stop; none would make it train a toy.
    known = FLAVORS.get(subject.step.inputs.model) or Flavor(subject.spec.name, subject.spec.name)
    sheet.set("model", known.name)
    sheet.set("flavor", known.flavor)


def _batch(subject: Subject, sheet: Sheet) -> None:
    settings, layout, inputs = subject.settings, subject.layout, subject.step.inputs
    rounds = settings.num_micro_batches if layout.pp > 1 else 1
    sheet.set("local_batch", settings.micro_batch * rounds)
    sheet.set("global_batch", inputs.global_batch)
    sheet.set("seq_len", inputs.seq_len)
    if sheet.version > LAST_TOML:
        sheet.set("no_graphs", not _graphs(subject))


def _graphs(subject: Subject) -> bool:
    layout = subject.layout
    return subject.step.inputs.stack == "graph" and layout.pp == 1 and layout.ep == 1


def _data_parallel(subject: Subject, sheet: Sheet) -> None:
    """Replicas and shards: torchtitan has either all state whole (DDP, alone) or all of it sharded (FSDP2)."""
    settings, layout = subject.settings, subject.layout
    alone = layout.world_size == layout.dp and layout.ep == 1
    if layout.zero == 0 and alone:
        sheet.set("replicate", layout.dp)
        sheet.set("shard", 1)
        return
    sheet.set("replicate", layout.hsdp)
    sheet.set("shard", layout.dp // layout.hsdp)
    whole = layout.zero < 3 or not settings.reshard
    sheet.set("reshard", "never" if whole else "always")
    if layout.zero < 3 and layout.dp * layout.cp > 1:
        kept = ("keeps all state whole", "shards the optimizer's state", "shards gradients and the optimizer's state")
        sheet.unsaid(
            f"torchtitan shards parameters and gradients too (FSDP2), kept gathered from forward to backward; the plan "
            f"{kept[layout.zero]} alone (zero={layout.zero}): its traffic and memory differ"
        )


def _inner_degrees(subject: Subject, sheet: Sheet) -> None:
    layout = subject.layout
    sheet.set("tp", layout.tp)
    if layout.tp > 1:
        if sheet.version > LAST_TOML:
            sheet.set("sequence_parallel", layout.sequence_parallel)
        elif not layout.sequence_parallel:
            sheet.unsaid("torchtitan 0.2.2 splits norms along the sequence wherever tp is above 1; the plan does not")
    sheet.set("cp", layout.cp)
    if layout.cp > 1:
        around = layout.cp_kind == "ring"
        why = f"the plan's attention is of kind {layout.cp_kind}"
        sheet.set("cp_rotate", "alltoall" if around else "allgather", why=why)
    sheet.set("ep", layout.ep)
    moe = any(isinstance(layer.mlp, MoE) for layer in subject.spec.kinds)
    if layout.ep > 1 and sheet.version <= LAST_TOML:
        sheet.set("etp", layout.etp)
    elif layout.ep == 1 and moe and layout.etp != layout.tp:
        sheet.unsaid(f"torchtitan splits experts as tp={layout.tp} where ep is 1; the plan has etp={layout.etp}")


def _pipeline(subject: Subject, sheet: Sheet) -> None:
    settings, layout = subject.settings, subject.layout
    sheet.set("pp", layout.pp)
    if layout.pp == 1:
        return
    sheet.set("schedule", schedule_class(settings))
    if schedule_file(settings, layout.pp, layout.vpp) is not None:
        sheet.set("schedule_csv", SCHEDULE_FILE)
    sheet.set("micro_batch", settings.micro_batch)
    stages = layout.pp * layout.vpp
    if settings.stage_layers or subject.step.inputs.model not in FLAVORS:
        head = "output" if sheet.version <= LAST_TOML else "lm_head"
        layers = chunk_layers(subject.spec, stages, settings.stage_layers)
        sheet.set("parts", *(" ".join(names) for names in stage_modules(layers, head)))
    else:
        # Embedding and loss count as layers by default; the plan's stages hold equally many layers.
        sheet.set("layers_per_stage", subject.spec.num_layers // stages)
        sheet.set("first_less", 0)
        sheet.set("last_less", 0)
    if settings.schedule == "dualpipev" and layout.ep > 1:
        sheet.set("pair_overlap", settings.recompute == "none", why="pairs overlap by default")
    if settings.schedule == "interleaved_pairs":
        sheet.unsaid("torchtitan runs the two halves of a pair from a schedule file one after the other")


def _kernels(subject: Subject, sheet: Sheet) -> None:
    settings, layout = subject.settings, subject.layout
    asked = [op for op in subject.entry.operators if op.strategy == "async_tp"]
    parted = splits_backward(settings, layout.pp)
    use = bool(asked) and not parted and layout.tp > 1
    if asked and parted:
        sheet.unsaid("torchtitan refuses compiled stages where the backward is split, and async TP needs them")
    if use or (subject.step.inputs.stack == "compiled" and not parted):
        sheet.set("compile", True)
        sheet.set("compiled", "model", "loss")
    if use:
        sheet.set("async_tp", True)
        names = ", ".join(f"{op.operator} {op.pass_}" for op in asked)
        sheet.unsaid(f"async TP in torchtitan is for all pairs that the compiler finds; the plan takes it for {names}")
    if settings.fp8:
        if sheet.version <= LAST_TOML:
            sheet.set("converters", "quantize.linear.float8")
            sheet.set("fp8_recipe", "rowwise")
        else:
            sheet.unsaid(
                "fp8 is a converter of the model from torchtitan 0.3.0 on: give model_registry() the converter "
                'Float8LinearConverter.Config(recipe_name="rowwise")'
            )


def _recompute(subject: Subject, sheet: Sheet) -> None:
    settings = subject.settings
    sheet.set("recompute", settings.recompute)
    if settings.recompute == "selective" and sheet.version <= LAST_TOML:
        sheet.set("recompute_option", "op")


def _left(subject: Subject, version: Version) -> Iterator[str]:
    """What no setting of either dialect says."""
    title, settings, layout = "torchtitan", subject.settings, subject.layout
    taken = set() if splits_backward(settings, layout.pp) else {"async_tp"}
    yield from strategies_left(subject, title, {*taken, "serial"})
    yield from recipe_left(subject, title, ("all_to_all",))
    yield from arranging_left(subject, title, {"fsdp_prefetch"} if layout.zero == 3 else set())
    yield from order_left(subject, title, _ORDER)
    yield from recompute_left(subject, title, "what is cheap (attention, every second product and traffic are kept)")
    yield from host_left(subject, title, graphs=version > LAST_TOML and _graphs(subject))
    if layout.dp * layout.cp > 1:
        hidden = settings.dp_overlap == "both" or any(name == "fsdp_prefetch" for name, _ in settings.arranging)
        if not hidden:
            what = "nothing of it" if settings.dp_overlap == "none" else "gradients alone"
            yield (
                f"torchtitan's data-parallel traffic runs beside computation always; the plan counts on {what} "
                "overlapped: expect less time than it predicts"
            )
        if layout.zero < 3:
            yield f"FSDP2 has one bucket a layer; the plan has buckets of {settings.bucket_bytes / 1e6:.3g} MB"


def _findings(subject: Subject, version: Version) -> Iterator[Finding]:
    known = FLAVORS.get(subject.step.inputs.model)
    if known is None or (version > LAST_TOML and not known.function):
        yield Finding(
            "model_not_in_framework",
            f"torchtitan {version} ships no {subject.step.inputs.model}; name your own model in the config, which does "
            "not start before",
        )
    if version <= LAST_TOML:
        message = "tokenizer, data and optimizer are torchtitan's defaults; name yours (model.hf_assets_path ...)"
        yield Finding("data_open", message)
    else:
        yield Finding(
            "batches_in_tokens",
            "the repository after torchtitan 0.3.0 counts batches in tokens (num_tokens_per_microbatch_per_dp_rank, "
            "num_tokens_per_train_step, max_context_length, num_pp_microbatches) and refuses the names written here",
        )


EMITTER = Torchtitan()
