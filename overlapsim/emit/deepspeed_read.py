"""Reads a DeepSpeed configuration: JSON with lines, and what it means."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from overlapsim.emit.base import Reading
from overlapsim.errors import UsageError
from overlapsim.workload.layout import Layout


@dataclass(frozen=True)
class DeepSpeedConfig:
    """A configuration.

    Attributes
    ----------
    content : as read
    text : for lines
    doubled : keys that stand twice in one block
    """

    content: Mapping[str, Any]
    text: str
    doubled: tuple[str, ...]

    def get(self, path: str, default: Any = None) -> Any:
        """Value under ``block.key``; the default where nothing is said."""
        value: Any = self.content
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                return default
            value = value[key]
        return value

    def whole(self, path: str, default: int) -> int:
        """Value that counts, its default where it is missing or no count."""
        value = self.get(path, default)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default

    def line(self, path: str) -> int | None:
        """Line of a key, looked for behind the keys it stands in; None where it is not there."""
        at = 0
        for key in path.split("."):
            found = re.compile(rf'"{re.escape(key)}"\s*:').search(self.text, at)
            if found is None:
                return None
            at = found.end()
        return self.text.count("\n", 0, at) + 1

    @property
    def stage(self) -> int:
        """Level of ZeRO."""
        value = self.get("zero_optimization.stage", 0)
        return value if value in (0, 1, 2, 3) and not isinstance(value, bool) else 0

    @property
    def overlaps(self) -> bool:
        """Whether reductions run beside the backward: where nothing is said, at level 3 alone."""
        value = self.get("zero_optimization.overlap_comm")
        return self.stage == 3 if value is None else value is True


def read_json(text: str) -> DeepSpeedConfig:
    """Configuration of a JSON text.

    Raises
    ------
    UsageError
        If it is no JSON, or no object.
    """
    doubled: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [key for key, _ in pairs]
        doubled.extend(sorted({key for key in names if names.count(key) > 1}))
        return dict(pairs)

    try:
        content = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"the configuration is no JSON ({error.msg}, line {error.lineno}); expected an object"
        ) from None
    if not isinstance(content, dict):
        raise UsageError("the configuration is no JSON object; expected the settings of DeepSpeed by name")
    return DeepSpeedConfig(content, text, tuple(doubled))


def reading(config: DeepSpeedConfig, world_size: int | None) -> Reading:
    """What a configuration means; a pipeline is in the model's code and is not seen.

    Raises
    ------
    LayoutError
        If its degrees make no layout.
    """
    tp = max(config.whole("tensor_parallel.autotp_size", 1), config.whole("tensor_parallel.tp.tp_size", 1))
    sp = config.whole("sequence_parallel_size", 1)
    ep = config.whole("expert_parallel.autoep_size", 1) if config.get("expert_parallel.enabled") is True else 1
    micro = config.whole("train_micro_batch_size_per_gpu", 0)
    rounds, batch = config.whole("gradient_accumulation_steps", 0), config.whole("train_batch_size", 0)
    if world_size is not None:
        dp = max(1, world_size // (tp * sp))
    else:
        dp = batch // (micro * rounds) if micro and rounds and batch else 1
    layout = Layout(
        tp=tp,
        sp=sp,
        ep=ep,
        etp=config.whole("expert_parallel.expert_tensor_parallel_size", 1) if ep > 1 else 0,
        dp=max(1, dp),
        zero=config.stage,
        sequence_parallel=tp == 1,
    )
    return Reading(
        layout,
        world_size=world_size,
        micro_batch=micro or (batch // (rounds * layout.dp) if batch and rounds else None) or None,
        global_batch=batch or (micro * rounds * layout.dp if micro and rounds else None) or None,
        settings=dict(_settings(config)),
    )


def _settings(config: DeepSpeedConfig) -> Iterator[tuple[str, Any]]:
    """Other settings by the names of `StepSettings`; parameters are gathered ahead at level 3 alone."""
    if config.stage:
        yield "dp_overlap", ("both" if config.stage == 3 else "gradients") if config.overlaps else "none"
    size = config.get("zero_optimization.reduce_bucket_size")
    if isinstance(size, int | float) and not isinstance(size, bool) and size > 0:
        yield "bucket_bytes", 4.0 * size
