"""Every option of Megatron's argument parser, with the versions that have it: read from the parsers themselves."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Final, get_args

from overlapsim.emit.rules import Flag, Form

BEFORE: Final[Mapping[str, str]] = {"--use-megatron-fsdp": "--use-custom-fsdp"}
"""How older versions spell what has the same meaning."""
INSTEAD: Final[Mapping[str, str]] = {
    "--use-custom-fsdp": "--use-megatron-fsdp",
    "--enable-cuda-graph": "--cuda-graph-impl local",
    "--external-cuda-graph": "--cuda-graph-impl transformer_engine",
    "--moe-enable-deepep": "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
    "--moe-deepep-num-sms": "--moe-flex-dispatcher-num-sms",
    "--moe-layer-recompute": "--recompute-granularity selective --recompute-modules moe",
    "--disable-tp-comm-split-ag": "--disable-tp-comm-overlap-ag",
    "--disable-tp-comm-split-rs": "--disable-tp-comm-overlap-rs",
}
"""What newer versions have for options that are gone or deprecated."""


@cache
def megatron_options() -> Mapping[str, Flag]:
    """Options by spelling: `since` and `until` are minor versions, empty where all that are known have it.

    Read from the parsers of Megatron-Core 0.13.0, 0.14.0, 0.15.3, 0.16.1, 0.17.1, 0.18.2 and 0.19.2, each run once; a
    change within a minor version goes unseen.

    Examples
    --------
    >>> options = megatron_options()
    >>> options["--overlap-moe-expert-parallel-comm"].since, options["--use-custom-fsdp"].until
    ('0.14', '0.14')
    """
    text = files("overlapsim.emit").joinpath("megatron_options.csv").read_text(encoding="utf-8")
    found: dict[str, Flag] = {}
    for row in csv.DictReader(text.splitlines()):
        form: Form = next(form for form in get_args(Form) if form == row["form"])
        choices = tuple(row["choices"].split())
        found[row["flag"]] = Flag(row["flag"], form, row["since"], row["until"], choices)
    return found | {flag: replace(found[flag], before=before) for flag, before in BEFORE.items()}
