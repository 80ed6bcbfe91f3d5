"""Check a Megatron argument list, launch script or test recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from overlapsim.emit.lint_base import Checked, Facts, Lint, Linter
from overlapsim.emit.lint_megatron_advice import missing_rule, no_effect_rule
from overlapsim.emit.lint_megatron_config import Config
from overlapsim.emit.lint_megatron_flags import flags_rule
from overlapsim.emit.lint_megatron_rules import (
    data_rule,
    expert_rule,
    fsdp_rule,
    pipeline_rule,
    queues_rule,
    recompute_rule,
    tensor_rule,
)
from overlapsim.emit.megatron_model_read import read_model
from overlapsim.emit.megatron_read import read_megatron, read_script
from overlapsim.emit.rules import Version
from overlapsim.errors import LayoutError, UsageError, WorkloadError

RULES: Final[tuple[Callable[[Config], Iterator[Lint]], ...]] = (
    flags_rule,
    queues_rule,
    tensor_rule,
    data_rule,
    fsdp_rule,
    pipeline_rule,
    expert_rule,
    recompute_rule,
)
"""Rules that name what does not go together."""
_MARKS: Final = re.compile(r"--(tensor-model-parallel-size|micro-batch-size|num-attention-heads|hidden-size)\b")


class MegatronLinter(Linter):
    """Flags by the parser's own table, then one rule a subject."""

    name = "megatron"
    framework = "megatron"

    def recognises(self, file_name: str, text: str) -> bool:
        """Whether there are flags that only Megatron has."""
        return _MARKS.search(text) is not None

    def check(self, text: str, facts: Facts, version: Version) -> Checked:
        """Check all rules; degrees that make no layout are a conflict themselves."""
        script = read_script(text)
        if not script.arguments:
            raise UsageError("the file has no --flags; expected a Megatron argument list, launch script or test recipe")
        config = Config(script, facts, version)
        lints = [lint for rule in (*RULES, no_effect_rule) for lint in rule(config)]
        lints += missing_rule(config, RULES)
        reading = None
        try:
            reading = replace(read_megatron(script, facts.world_size), model=read_model(script))
        except (LayoutError, WorkloadError) as error:
            if not any(lint.kind == "conflict" for lint in lints):
                lints.append(Lint("conflict", None, str(error), "take degrees that make a layout"))
        return Checked(tuple(lints), reading)


LINTER: Final = MegatronLinter()
