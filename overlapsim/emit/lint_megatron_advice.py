"""What a Megatron launch says without effect, and what overlap it does not ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from overlapsim.emit.lint_base import Lint
from overlapsim.emit.lint_megatron_config import Config
from overlapsim.emit.megatron_options import INSTEAD

_TP_SWITCHES: Final = (
    *("--tp-comm-overlap-cfg", "--tp-comm-overlap-rs-dgrad", "--tp-comm-bootstrap-backend"),
    *("--disable-tp-comm-overlap-ag", "--disable-tp-comm-overlap-rs", "--no-tp-comm-overlap-ag"),
    *("--disable-tp-comm-bulk-dgrad", "--disable-tp-comm-bulk-wgrad", "--no-tp-comm-overlap-rs"),
)
_BUCKETS: Final = ("--ddp-bucket-size", "--ddp-num-buckets", "--ddp-pad-buckets-for-high-nccl-busbw")
_INTERLEAVED_ONLY: Final = (
    *("--overlap-p2p-communication-warmup-flush", "--no-align-param-gather", "--no-align-grad-reduce"),
    *("--disable-align-grad-reduce", "--microbatch-group-size-per-virtual-pipeline-stage"),
)


_VIRTUAL: Final = "--num-virtual-stages-per-pipeline-rank"
_WRONG: Final = ("conflict", "unknown")
_PAIRS: Final = "--overlap-moe-expert-parallel-comm"


def no_effect_rule(c: Config) -> Iterator[Lint]:
    """Flags that do nothing here."""
    if c.tp == 1:
        for flag in ("--sequence-parallel", "--tp-comm-overlap"):
            if c.has(flag):
                yield c.lint("no_effect", f"{flag} does nothing with tp = 1", "leave it out", flag)
    if not c.has("--tp-comm-overlap"):
        for flag in _TP_SWITCHES:
            if c.has(flag):
                yield c.lint(
                    "no_effect", f"{flag} does nothing without --tp-comm-overlap", "add it, or leave this out", flag
                )
    if not c.has("--overlap-grad-reduce") and not c.fsdp:
        for flag in _BUCKETS:
            if c.has(flag):
                message = f"{flag} does nothing without --overlap-grad-reduce: there is one bucket"
                yield c.lint("no_effect", message, "add --overlap-grad-reduce", flag)
    if c.overlaps_dp and c.dp is not None and c.dp * c.cp == 1:
        message = "overlap of gradients or parameters with one data-parallel rank: nothing is reduced"
        yield c.lint("no_effect", message, "leave it out", "--overlap-grad-reduce", "--overlap-param-gather")
    if not c.interleaved:
        for flag in _INTERLEAVED_ONLY:
            if c.has(flag):
                message = f"{flag} does nothing without virtual stages"
                yield c.lint("no_effect", message, "add --num-virtual-stages-per-pipeline-rank, or leave it out", flag)
        if c.has("--no-overlap-p2p-communication"):
            flag = "--no-overlap-p2p-communication"
            message = f"{flag} does nothing without virtual stages: transfers are not overlapped then"
            yield c.lint("no_effect", message, "leave it out", flag)
    if c.has("--data-parallel-sharding-strategy") and not c.has("--use-megatron-fsdp", "--use-custom-fsdp"):
        flag = "--data-parallel-sharding-strategy"
        yield c.lint("no_effect", f"{flag} does nothing without --use-megatron-fsdp", "add it, or leave this out", flag)
    if c.has("--moe-shared-expert-overlap") and not c.has("--moe-shared-expert-intermediate-size"):
        flag = "--moe-shared-expert-overlap"
        yield c.lint("no_effect", f"{flag} without shared experts", "leave it out", flag)
    for flag, better in INSTEAD.items():
        if c.has(flag) and flag.startswith(
            ("--disable-tp-comm-split", "--moe-enable", "--moe-deepep", "--moe-layer-rec")
        ):
            yield c.lint("no_effect", f"{flag} is an old spelling", f"write {better}", flag)


Rule = Callable[[Config], Iterator[Lint]]


def missing_rule(c: Config, rules: Sequence[Rule] = ()) -> Iterator[Lint]:
    """Overlap that is not asked for.

    Parameters
    ----------
    c : launch
    rules : that name conflicts: what they would say of the launch with a fix is part of the fix, or the fix not named
    """

    def more(*flags: str) -> list[str]:
        """Fixes of the conflicts that flags would bring."""
        there, then = (
            {lint.message: lint.fix for rule in rules for lint in rule(config) if lint.kind in _WRONG}
            for config in (c, c.with_flags(*flags))
        )
        return [f", and {fix}" for message, fix in then.items() if message not in there]

    if c.dp is not None and c.dp * c.cp > 1 and not c.has("--overlap-grad-reduce"):
        message = f"gradients of {c.dp * c.cp} data-parallel ranks are reduced after the backward pass, all exposed"
        fix = "add --overlap-grad-reduce" + "".join(more("--overlap-grad-reduce"))
        yield Lint("missing", None, message, fix, (("dp_overlap", "gradients"),))
    elif c.overlaps_dp and c.has("--use-distributed-optimizer") and not c.has("--overlap-param-gather"):
        message = "parameters of the distributed optimizer are gathered before the forward pass, all exposed"
        fix = "add --overlap-param-gather" + "".join(more("--overlap-param-gather"))
        yield Lint("missing", c.script.line("--use-distributed-optimizer"), message, fix, (("dp_overlap", "both"),))
    if c.tp > 1 and not c.sequence_parallel:
        message = (
            f"tp = {c.tp} without sequence parallelism: all-reduces cannot be overlapped by pieces, norms are repeated"
        )
        fix = "add --sequence-parallel, then --tp-comm-overlap"
        yield Lint("missing", c.script.line("--tensor-model-parallel-size"), message, fix)
    elif c.tp > 1 and not c.has("--tp-comm-overlap"):
        message = f"gathers and reduce-scatters of tp = {c.tp} are exposed in the forward pass"
        fix = "add --tp-comm-overlap; `emit --to transformer_engine --model M` fills its file"
        line = c.script.line("--tensor-model-parallel-size")
        yield Lint("missing", line, message, fix, (("tp_overlap", True),))
    if c.pp > 1 and not c.interleaved and any(not more(f"{_VIRTUAL} {count}") for count in _counts(c)):
        message = f"pp = {c.pp} without virtual stages: transfers block and the bubble is whole"
        fix = f"add {_VIRTUAL}"
        yield Lint("missing", c.script.line("--pipeline-model-parallel-size"), message, fix)
    other = "--overlap-dispatch-backward-with-experts-wgrad"
    if c.ep > 1 and not c.pairs and not c.has(other, "--moe-shared-expert-overlap") and not more(_PAIRS):
        if max(c.tp, c.cp) > 1 and c.before_blackwell:
            return  # Megatron warns of both together: each wants another number of queues
        message = f"exchanges of ep = {c.ep} are exposed in both passes"
        line = c.script.line("--expert-model-parallel-size")
        yield Lint("missing", line, message, f"add {_PAIRS}", (("expert_pairs", True),))


def _counts(c: Config) -> Iterator[int]:
    """Virtual stages that a stage may have."""
    layers = c.number("--num-layers", 0) // c.pp
    yield from range(2, max(2, layers) + 1)
