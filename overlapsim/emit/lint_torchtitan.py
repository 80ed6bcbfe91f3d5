"""Checks of torchtitan's configs: what it refuses, what does nothing, which overlap is not asked for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Final

from overlapsim.emit.lint_base import Checked, Facts, Lint, Linter
from overlapsim.emit.rules import Version
from overlapsim.emit.torchtitan_flags import FIRST_PYTHON, FLAGS, LAST_TOML, settled
from overlapsim.emit.torchtitan_keys import known_keys
from overlapsim.emit.torchtitan_read import MANY_STAGES, TitanConfig, read_python, read_toml, reading
from overlapsim.errors import LayoutError
from overlapsim.plan import Finding

SCHEDULES: Final = frozenset({"gpipe", "1f1b", *MANY_STAGES})
"""Of torch.distributed.pipelining, lower case: it takes any case."""
_PARTED: Final = frozenset({"interleavedzerobubble", "zbvzerobubble", "dualpipev"})
_TOML_ONLY: Final = Finding(
    "framework_version_stale",
    f"torchtitan reads TOML up to {LAST_TOML}, by whose rules this file was checked; later versions take a Python "
    "config: emit a plan for one",
)
_WHOLE: Final = (
    *("local_batch", "seq_len", "replicate", "shard", "tp", "pp", "micro_batch", "cp", "ep", "etp"),
    *("first_less", "last_less"),
)


class TorchtitanLinter(Linter):
    """torchtitan's TOML and Python configs."""

    name = "torchtitan"
    framework = "torchtitan"

    def recognises(self, file_name: str, text: str) -> bool:
        """TOML with a section of parallelism, or Python that imports torchtitan."""
        if file_name.endswith(".toml"):
            return re.search(r"^\s*\[(parallelism|activation_checkpoint|training)\]", text, re.MULTILINE) is not None
        return file_name.endswith(".py") and re.search(r"^\s*from torchtitan", text, re.MULTILINE) is not None

    def check(self, text: str, facts: Facts, version: Version) -> Checked:
        """Check a config by the dialect it is written in.

        Raises
        ------
        UsageError
            If it is neither TOML nor Python.
        """
        python = re.search(r"^\s*(from|import|def) \w", text, re.MULTILINE) is not None
        version = settled(version)
        config = read_python(text, max(version, FIRST_PYTHON)) if python else read_toml(text, version)
        stale = () if python or version <= LAST_TOML else (_TOML_ONLY,)
        lints = [*_unknown(config), *_values(config)]
        try:
            found = reading(config, facts.world_size)
        except LayoutError as error:
            lints.append(Lint("conflict", None, str(error), "give degrees that agree"))
            return Checked(tuple(lints), findings=stale)
        for rules in (_ranks, _batch, _pipeline, _experts, _kernels, _idle):
            lints += rules(config, facts)
        return Checked(tuple(lints), found, stale)


def _unknown(config: TitanConfig) -> Iterator[Lint]:
    """Keys that the parser refuses."""
    for spelling, said in config.said.items():
        section, _, key = spelling.rpartition(".")
        keys = known_keys(section, config.version)
        if keys is None or key in keys:
            continue
        gone = next((flag for flag in FLAGS.values() if spelling in (flag.spelling, flag.before)), None)
        if gone is not None and (now := gone.spelt(config.version)) is not None:
            fix = f"write {now}"
        elif gone is not None:
            fix = "leave it out: this version has no such setting"
        else:
            near = difflib.get_close_matches(key, keys, n=1)
            fix = f"did you mean {near[0]}?" if near else "leave it out"
        yield Lint(
            "unknown", said.line, f"{spelling} is no setting of torchtitan {config.version}, which refuses it", fix
        )


def _values(config: TitanConfig) -> Iterator[Lint]:
    """Values of a wrong type or word, which the parsers let through."""
    for name in _WHOLE:
        if FLAGS[name].spelt(config.version) is None:
            continue
        value = config.get(name)
        low = -1 if name == "shard" else 0 if name in ("first_less", "last_less") else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (name == "shard" and value == 0):
            spelling = FLAGS[name].spelt(config.version)
            yield Lint("conflict", config.line(name), f"{spelling} is {value!r}", f"write a whole number from {low}")
    for name, words in (
        ("reshard", FLAGS["reshard"].choices),
        ("cp_rotate", FLAGS["cp_rotate"].choices),
        ("recompute", (*FLAGS["recompute"].choices, "memory_budget")),
    ):
        if FLAGS[name].spelt(config.version) is not None and config.get(name) not in words:
            spelling = FLAGS[name].spelt(config.version)
            message = f"{spelling} is {config.get(name)!r}, which the parser takes and the run does not"
            yield Lint("conflict", config.line(name), message, f"write one of {', '.join(words)}")
    schedule = str(config.get("schedule"))
    if schedule.lower() not in SCHEDULES and not config.get("schedule_csv"):
        near = difflib.get_close_matches(schedule.lower(), SCHEDULES, n=1)
        hint = f"did you mean {near[0]}?" if near else "take 1F1B, Interleaved1F1B, ZBVZeroBubble or DualPipeV"
        message = f"torch has no pipeline schedule {schedule}; the run stops when it is made"
        yield Lint("conflict", config.line("schedule"), message, hint)


def _ranks(config: TitanConfig, facts: Facts) -> Iterator[Lint]:
    """Product of the degrees against the ranks, and lengths of sequences."""
    world = facts.world_size
    tp, cp, pp, replicate, shard = (config.whole(n) for n in ("tp", "cp", "pp", "replicate", "shard"))
    inner = tp * cp * pp * replicate
    if world is not None and (world % inner if shard == -1 else world != inner * shard):
        message = f"dp_replicate x dp_shard x cp x tp x pp is {inner * abs(shard)} and there are {world} ranks"
        yield Lint(
            "conflict", config.line("shard"), message, "leave data_parallel_shard_degree at -1, or make it agree"
        )
    divisor = tp * (2 * cp if cp > 1 else 1)
    if config.whole("seq_len") % divisor:
        message = f"sequences of {config.whole('seq_len')} tokens do not divide by tp x 2 cp = {divisor}"
        yield Lint("conflict", config.line("seq_len"), message, f"take a multiple of {divisor}")
    if shard == 1 and cp == 1 and replicate > 1 and tp * pp > 1:
        message = f"replicas alone (DDP) do not go together with tp={tp} and pp={pp}"
        yield Lint(
            "conflict", config.line("replicate"), message, "shard parameters: data_parallel_shard_degree above 1"
        )


def _batch(config: TitanConfig, facts: Facts) -> Iterator[Lint]:
    """Batches that do not divide."""
    local, micro, pp = config.whole("local_batch"), config.whole("micro_batch"), config.whole("pp")
    if pp > 1 and micro and local % micro:
        message = f"a local batch of {local} does not divide into micro-batches of {micro}"
        yield Lint("conflict", config.line("micro_batch"), message, f"take a divisor of {local}")
    wanted = config.whole("global_batch")
    dp = reading(config, facts.world_size).layout.dp
    known = config.whole("shard") != -1 or facts.world_size is not None
    if known and wanted > 0 and wanted % (local * dp):
        message = f"a global batch of {wanted} is no multiple of local batch x data-parallel ranks = {local * dp}"
        yield Lint("conflict", config.line("global_batch"), message, f"take a multiple of {local * dp}")


def _pipeline(config: TitanConfig, facts: Facts) -> Iterator[Lint]:
    """Stages, schedules, and what the two leave idle."""
    pp, schedule = config.whole("pp"), str(config.get("schedule")).lower()
    if pp == 1:
        return
    stages, from_file = config.num_stages, bool(config.get("schedule_csv"))
    if stages is not None and stages % pp:
        message = f"{stages} stages do not divide over {pp} pipeline ranks"
        yield Lint("conflict", config.line("layers_per_stage"), message, "take other layers per stage")
    elif stages is not None and schedule in SCHEDULES:
        each = stages // pp
        wrong = each < 2 if schedule in MANY_STAGES else each != 1
        if wrong or (schedule in ("zbvzerobubble", "dualpipev") and each != 2):
            message = f"{config.get('schedule')} does not run with {each} stages on each rank"
            fix = (
                "take a schedule for one stage a rank (1F1B)" if each == 1 else "take Interleaved1F1B, or other stages"
            )
            yield Lint("conflict", config.line("schedule"), message, fix)
    rounds = config.whole("local_batch") // max(1, config.whole("micro_batch"))
    if schedule == "dualpipev" and rounds < 2 * pp:
        message = f"DualPipeV needs 2 x pp = {2 * pp} micro-batches; there are {rounds}"
        yield Lint("conflict", config.line("schedule"), message, f"take a local batch of {2 * pp} micro-batches")
    elif rounds < pp:
        message = f"{rounds} micro-batches cannot fill {pp} stages: the pipeline stands idle most of the step"
        yield Lint("missing", config.line("local_batch"), message, f"take a local batch of {pp} micro-batches or more")
    if schedule in _PARTED and config.get("compile") is True and not from_file:
        message = f"{config.get('schedule')} splits the backward, which compiled stages do not allow"
        yield Lint("conflict", config.line("compile"), message, "leave compile off, or take Interleaved1F1B")
    if config.version > LAST_TOML and config.get("no_graphs") is not True:
        message = "CUDA graphs are on by default and refused with a pipeline"
        yield Lint("conflict", config.line("no_graphs"), message, "set training.disable_cuda_graphs to True")
    if config.get("reshard") == "always":
        message = "parameters are gathered again for every micro-batch of every stage"
        yield Lint(
            "missing", config.line("reshard"), message, "set fsdp_reshard_after_forward to never if memory allows"
        )


def _experts(config: TitanConfig, facts: Facts) -> Iterator[Lint]:
    """The grid of experts."""
    ep, etp, tp, cp = (config.whole(name) for name in ("ep", "etp", "tp", "cp"))
    if ep == 1:
        return
    if etp not in (1, tp):
        message = f"experts split over {etp} ranks with tp={tp}"
        yield Lint("conflict", config.line("etp"), message, f"take 1 or {tp}")
        return
    layout = reading(config, facts.world_size).layout
    ranks = layout.dp // config.whole("replicate") * cp * (tp if etp == 1 else 1)
    known = config.whole("shard") != -1 or facts.world_size is not None
    if known and ranks % ep:
        message = f"ep={ep} does not divide the {ranks} ranks that experts are dealt to (dp_shard x cp x tp)"
        yield Lint("conflict", config.line("ep"), message, f"take a divisor of {ranks}")
    pairs = str(config.get("schedule")).lower() == "dualpipev" and config.whole("pp") > 1
    if pairs and config.version <= LAST_TOML and config.get("pair_overlap") and config.get("recompute") != "none":
        message = "the overlap of pairs does not work with activation checkpointing"
        fix = "set activation_checkpoint.mode to none, or pipeline_parallel_expert_parallel_overlap to false"
        yield Lint("conflict", config.line("recompute"), message, fix)


def _kernels(config: TitanConfig, facts: Facts) -> Iterator[Lint]:
    """Async tensor parallelism and what it needs."""
    tp, compiled = config.whole("tp"), config.get("compile") is True and "model" in config.get("compiled")
    if config.get("async_tp") is True:
        if tp == 1:
            message = "async tensor parallelism does nothing with a tensor-parallel degree of 1"
            yield Lint("no_effect", config.line("async_tp"), message, "leave it out")
        elif not compiled:
            message = "async tensor parallelism works in compiled models alone; torchtitan stops without"
            yield Lint("conflict", config.line("async_tp"), message, 'set compile.enable, with "model" in components')
    elif tp > 1 and str(config.get("schedule")).lower() not in _PARTED:
        message = f"collectives of tp={tp} stand between the products: nothing hides them"
        fix = f"set {FLAGS['async_tp'].spelt(config.version)} and compile.enable"
        yield Lint("missing", config.line("tp"), message, fix)


def _idle(config: TitanConfig, facts: Facts) -> Iterator[Lint]:
    """Settings that nothing reads here."""
    pp, ep, cp = (config.whole(name) for name in ("pp", "ep", "cp"))
    pipeline = ("schedule", "schedule_csv", "micro_batch", "layers_per_stage", "parts")
    idle = {
        "without a pipeline": pipeline if pp == 1 else (),
        "without expert parallelism": ("etp",) if ep == 1 and config.whole("etp") != 1 else (),
        "without context parallelism": ("cp_rotate",) if cp == 1 else (),
        "where the components are not compiled": ("compiled",) if config.get("compile") is not True else (),
    }
    for when, names in idle.items():
        for name in names:
            if config.names(name):
                spelling = FLAGS[name].spelt(config.version)
                yield Lint("no_effect", config.line(name), f"{spelling} does nothing {when}", "leave it out")
    if pp > 1 and config.names("layers_per_stage") and config.names("parts"):
        message = "layers per stage do nothing where the modules of each stage are listed"
        yield Lint("no_effect", config.line("layers_per_stage"), message, "leave one of the two out")


LINTER = TorchtitanLinter()
