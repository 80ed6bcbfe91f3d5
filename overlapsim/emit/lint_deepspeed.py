"""Checks of DeepSpeed's configurations: what it refuses or ignores, and which overlap is not asked for."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Final

from overlapsim.emit.deepspeed_keys import REMOVED, REMOVED_ZERO, TOP, ZERO, ZERO_COUNTS
from overlapsim.emit.deepspeed_read import DeepSpeedConfig, read_json, reading
from overlapsim.emit.lint_base import Checked, Facts, Lint, Linter
from overlapsim.emit.rules import Version
from overlapsim.errors import LayoutError

_Z: Final = "zero_optimization"
_LEVEL_3: Final = ("zero_hpz_partition_size", "zero_quantized_weights", "sub_group_size")


class DeepSpeedLinter(Linter):
    """DeepSpeed's JSON."""

    name = "deepspeed"
    framework = "deepspeed"

    def recognises(self, file_name: str, text: str) -> bool:
        """JSON that names ZeRO or DeepSpeed's batches."""
        return file_name.endswith(".json") and any(
            f'"{key}"' in text for key in (_Z, "train_micro_batch_size_per_gpu", "train_batch_size")
        )

    def check(self, text: str, facts: Facts, version: Version) -> Checked:
        """Check a configuration.

        Raises
        ------
        UsageError
            If it is no JSON object.
        """
        config = read_json(text)
        lints = [*_keys(config, version), *_values(config), *_batch(config, facts), *_idle(config), *_overlap(config)]
        try:
            return Checked(tuple(lints), reading(config, facts.world_size))
        except LayoutError as error:
            lints.append(Lint("conflict", None, str(error), "give degrees that agree"))
            return Checked(tuple(lints))


def _keys(config: DeepSpeedConfig, version: Version) -> Iterator[Lint]:
    """Keys that are refused, ignored, or there twice."""
    for key in config.doubled:
        yield Lint("conflict", config.line(key), f"{key} stands twice, which DeepSpeed refuses", "leave one out")
    for key in config.content:
        if key in REMOVED:
            message = f"{key} was removed: DeepSpeed {version} stops at it"
            yield Lint("conflict", config.line(key), message, REMOVED[key])
        elif key == "domino":
            message = "DeepSpeed has no setting for Domino: the block is not read"
            yield Lint("unknown", config.line(key), message, "build the model of deepspeed.runtime.domino's layers")
        elif key not in TOP and key != "overlapsim":
            near = difflib.get_close_matches(key, TOP, n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            yield Lint("unknown", config.line(key), f"{key} is not read by DeepSpeed {version}, without a word", hint)
    zero = config.get(_Z, {})
    for key in zero if isinstance(zero, dict) else ():
        line = config.line(f"{_Z}.{key}")
        if key in REMOVED_ZERO:
            yield Lint("conflict", line, f"{key} was removed: DeepSpeed {version} stops at it", REMOVED_ZERO[key])
        elif key not in ZERO:
            near = difflib.get_close_matches(key, ZERO, n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            yield Lint("conflict", line, f"{_Z} has no {key}: DeepSpeed {version} stops at it", hint)


def _values(config: DeepSpeedConfig) -> Iterator[Lint]:
    """Values that the parser refuses."""
    stage = config.get(f"{_Z}.stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        yield Lint("conflict", config.line(f"{_Z}.stage"), f"ZeRO's stage is {stage!r}", "write 0, 1, 2 or 3")
    for key in ZERO_COUNTS:
        value = config.get(f"{_Z}.{key}", 1)
        line = config.line(f"{_Z}.{key}")
        if value == "auto":
            message = f'{key} is "auto", which only the integration of Hugging Face fills in'
            yield Lint("conflict", line, message, "write a number of elements where DeepSpeed is started otherwise")
        elif isinstance(value, str | bool) or value != int(value) or value < 0:
            yield Lint("conflict", line, f"{key} is {value!r}", "write a whole number of elements such as 500000000")
    if config.get("fp16.enabled") is True and config.get("bf16.enabled") is True:
        yield Lint("conflict", config.line("fp16"), "fp16 and bf16 are both on", "keep one of the two")


def _batch(config: DeepSpeedConfig, facts: Facts) -> Iterator[Lint]:
    """The product of batch sizes."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    values = {name: config.get(name) for name in names}
    filled = [name for name, value in values.items() if value == "auto"]
    for name in filled:
        message = f'{name} is "auto", which only the integration of Hugging Face fills in'
        yield Lint("conflict", config.line(name), message, "write a number where DeepSpeed is started otherwise")
    if values["train_batch_size"] is None and values["train_micro_batch_size_per_gpu"] is None:
        message = "neither the batch nor the micro-batch is said"
        yield Lint("conflict", None, message, "give train_micro_batch_size_per_gpu and gradient_accumulation_steps")
    if filled or any(not isinstance(value, int) for value in values.values()):
        return
    batch, micro, rounds = (int(values[name]) for name in names)
    if batch < 1 or micro < 1 or rounds < 1:
        yield Lint("conflict", config.line(names[0]), "batch sizes below 1", "write whole numbers from 1")
        return
    if facts.world_size is not None:
        ranks = reading(config, facts.world_size).layout.dp
        if batch != micro * rounds * ranks:
            message = f"train_batch_size {batch} is not {micro} x {rounds} x {ranks} data-parallel ranks"
            yield Lint("conflict", config.line(names[0]), message, f"write {micro * rounds * ranks}, or leave it out")
    elif batch % (micro * rounds):
        message = f"train_batch_size {batch} is no multiple of {micro} x {rounds}"
        yield Lint("conflict", config.line(names[0]), message, "make the three agree")


def _idle(config: DeepSpeedConfig) -> Iterator[Lint]:
    """Settings that nothing reads at this level of ZeRO."""
    zero = config.get(_Z, {})
    for key in zero if isinstance(zero, dict) else ():
        if config.stage < 3 and (key.startswith("stage3_") or key in _LEVEL_3) and key in ZERO:
            message = f"{key} does nothing at ZeRO {config.stage}"
            yield Lint("no_effect", config.line(f"{_Z}.{key}"), message, "leave it out, or take stage 3")
    if config.stage == 0 and config.get(f"{_Z}.overlap_comm") is True:
        message = "overlap_comm does nothing without ZeRO"
        yield Lint("no_effect", config.line(f"{_Z}.overlap_comm"), message, "take stage 1 to 3")
    tp = config.whole("tensor_parallel.autotp_size", 1)
    if config.get("tensor_parallel.tp_overlap_comm") is True and tp == 1:
        message = "tp_overlap_comm does nothing without tensor parallelism"
        yield Lint("no_effect", config.line("tensor_parallel.tp_overlap_comm"), message, "leave it out")


def _overlap(config: DeepSpeedConfig) -> Iterator[Lint]:
    """Overlap that is not asked for."""
    line = config.line(f"{_Z}.overlap_comm") or config.line(f"{_Z}.stage")
    if config.stage and not config.overlaps:
        default = "; it is off unless asked for below stage 3" if config.get(f"{_Z}.overlap_comm") is None else ""
        message = f"gradients are reduced after the backward, not beside it{default}"
        yield Lint("missing", line, message, f'write "overlap_comm": true in {_Z}')
    if config.stage == 3 and config.get(f"{_Z}.stage3_prefetch_bucket_size") == 0:
        where = config.line(f"{_Z}.stage3_prefetch_bucket_size")
        message = "parameters are gathered when they are needed: nothing hides the gathers"
        yield Lint("missing", where, message, "write a number of elements such as 50000000, the default")
    if config.stage == 0 and config.get(_Z) is not None:
        message = "without ZeRO gradients are reduced after the backward"
        yield Lint("missing", config.line(f"{_Z}.stage"), message, "take stage 1 with overlap_comm")
    tp = config.whole("tensor_parallel.autotp_size", 1)
    if tp > 1 and config.get("tensor_parallel.tp_overlap_comm") is not True:
        message = f"all-reduces of tp={tp} stand between the products: nothing hides them"
        where = config.line("tensor_parallel.autotp_size")
        yield Lint("missing", where, message, 'write "tp_overlap_comm": true in tensor_parallel')


LINTER = DeepSpeedLinter()
