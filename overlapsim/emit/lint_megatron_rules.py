"""What a Megatron launch says that does not go together: refused by its checks, or only when training starts.

Rules are those of Megatron-Core's argument checks, configuration and rank grid; those that its parser lets through are
here as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from overlapsim.emit.lint_base import Lint
from overlapsim.emit.lint_megatron_config import Config
from overlapsim.emit.megatron_env import QUEUES
from overlapsim.emit.megatron_read import stages_of


def queues_rule(c: Config) -> Iterator[Lint]:
    """Hardware queues against what is to overlap."""
    wide = max(c.tp, c.cp) > 1
    degrees = f"tp = {c.tp}, cp = {c.cp}"
    if c.queues == "1" and c.fsdp:
        message = f"{QUEUES}=1 with FSDP: gathers wait for scatters in the one queue, and Megatron refuses it"
        yield Lint("conflict", c.queue_line, message, f"unset {QUEUES}")
    elif c.queues == "1" and c.pairs and c.pairs_need_queues_alone:
        message = (
            f"{QUEUES}=1 with --overlap-moe-expert-parallel-comm: exchanges wait for the kernels they should run beside"
        )
        yield Lint("conflict", c.queue_line, message, f"unset {QUEUES}")
    elif c.queues == "1" and not wide and c.overlaps_dp:
        message = (
            f"{QUEUES}=1 with {degrees}: one hardware queue is for tensor and context parallelism; here it only keeps "
            f"{_dp_flags(c)} from overlapping"
        )
        yield Lint("conflict", c.queue_line, message, f"unset {QUEUES}")
    elif c.queues != "1" and wide and not c.fsdp and c.before_blackwell:
        given = "not set here" if c.queues is None else c.queues
        if c.pairs:
            return
        message = f"{QUEUES} is {given} with {degrees}: GPUs before Blackwell need communication launched first"
        yield Lint("conflict", c.queue_line, message, f"export {QUEUES}=1 (Megatron asserts it)")


def _dp_flags(c: Config) -> str:
    flags = [flag for flag in ("--overlap-grad-reduce", "--overlap-param-gather") if c.has(flag)]
    return " and ".join(flags)


def tensor_rule(c: Config) -> Iterator[Lint]:
    """Tensor parallelism and its overlap."""
    if c.has("--tp-comm-overlap") and c.tp > 1 and not c.sequence_parallel:
        message = "--tp-comm-overlap without --sequence-parallel: what it overlaps are gathers and reduce-scatters"
        yield c.lint("conflict", message, "add --sequence-parallel", "--tp-comm-overlap")
    heads = c.script.number("--num-attention-heads")
    if heads and heads % c.tp:
        yield c.lint(
            "conflict", f"{heads} heads do not divide by tp = {c.tp}", "take a divisor", "--num-attention-heads"
        )
    groups = c.script.number("--num-query-groups") if c.has("--group-query-attention") else None
    if groups and groups % c.tp and c.tp % groups:
        message = f"{groups} query groups and tp = {c.tp}: neither divides the other"
        yield c.lint("conflict", message, "take a tp that does", "--num-query-groups")
    seq = c.script.number("--seq-length")
    if seq and c.cp > 1 and seq % (2 * c.cp):
        message = f"{seq} tokens do not divide by 2 x cp = {2 * c.cp}"
        yield c.lint("conflict", message, "take a multiple: each rank has a part of both ends", "--seq-length")
    elif seq and c.sequence_parallel and seq // c.cp % c.tp:
        message = f"{seq // c.cp} tokens on a rank do not divide by tp = {c.tp} with sequence parallelism"
        yield c.lint(
            "conflict", message, "take a multiple (the parser lets it through; training stops)", "--seq-length"
        )
    sizes = c.script.by_flag.get("--hierarchical-context-parallel-sizes")
    if c.value("--cp-comm-type") == "a2a+p2p" and sizes is None:
        message = "--cp-comm-type a2a+p2p without --hierarchical-context-parallel-sizes"
        yield c.lint("conflict", message, "give both sizes; their product is cp", "--cp-comm-type")


def data_rule(c: Config) -> Iterator[Lint]:
    """Data parallelism: batches, ranks and overlap."""
    if c.has("--overlap-param-gather") and not c.has("--overlap-grad-reduce"):
        yield c.lint(
            "conflict",
            "--overlap-param-gather without --overlap-grad-reduce",
            "add --overlap-grad-reduce",
            "--overlap-param-gather",
        )
    muon = "muon" in c.value("--optimizer")
    if c.has("--overlap-param-gather") and not (c.has("--use-distributed-optimizer") or c.fsdp or muon):
        message = "--overlap-param-gather without a sharded optimizer: there are no parameters to gather"
        yield c.lint("conflict", message, "add --use-distributed-optimizer", "--overlap-param-gather")
    step = "--overlap-param-gather-with-optimizer-step"
    if c.has(step):
        lacking = [f for f in ("--use-distributed-optimizer", "--overlap-param-gather") if not c.has(f)]
        if not c.interleaved:
            lacking.append("virtual stages")
        if lacking:
            yield c.lint("conflict", f"{step} needs {', '.join(lacking)}", "add them, or leave it out", step)
        if c.value("--ckpt-format", "torch_dist") != "torch":
            yield c.lint("conflict", f"{step} is refused with distributed checkpoints", "add --ckpt-format torch", step)
    model = c.tp * c.cp * c.pp
    if c.world_size and c.world_size % model:
        message = f"{c.world_size} ranks do not divide by tp x cp x pp = {model}"
        yield c.lint("conflict", message, "take other degrees or ranks", "--tensor-model-parallel-size")
    batch, each = c.script.number("--global-batch-size"), c.script.number("--micro-batch-size")
    if batch and each and c.dp and batch % (each * c.dp):
        message = f"a global batch of {batch} does not divide by micro-batch x dp = {each} x {c.dp}"
        yield c.lint("conflict", message, f"take a multiple of {each * c.dp}", "--global-batch-size")


def fsdp_rule(c: Config) -> Iterator[Lint]:
    """What FSDP in Megatron takes and refuses."""
    if c.has("--use-torch-fsdp2"):
        for what, there in (
            (f"pp = {c.pp}", c.pp > 1),
            (f"ep = {c.ep}", c.ep > 1),
            ("--use-distributed-optimizer", c.has("--use-distributed-optimizer")),
            ("--fp16", c.has("--fp16")),
            ("tied embeddings", not c.has("--untie-embeddings-and-output-weights")),
            ("fused gradient accumulation", not c.has("--no-gradient-accumulation-fusion")),
        ):
            if there:
                yield c.lint("conflict", f"--use-torch-fsdp2 with {what}", "leave one of them out", "--use-torch-fsdp2")
    if c.has("--use-megatron-fsdp") and c.value("--ckpt-format", "fsdp_dtensor") != "fsdp_dtensor":
        message = "--use-megatron-fsdp saves checkpoints as fsdp_dtensor only"
        yield c.lint("conflict", message, "write --ckpt-format fsdp_dtensor", "--ckpt-format")


def pipeline_rule(c: Config) -> Iterator[Lint]:
    """Stages, virtual stages and rounds of micro-batches."""
    spellings = [
        flag
        for flag in (
            "--num-layers-per-virtual-pipeline-stage",
            "--num-virtual-stages-per-pipeline-rank",
            "--pipeline-model-parallel-layout",
        )
        if c.has(flag)
    ]
    if len(spellings) > 1:
        yield c.lint("conflict", f"{' and '.join(spellings)} say the same", "keep one", spellings[1])
    yield from _layers(c)
    flush, off = "--overlap-p2p-communication-warmup-flush", "--no-overlap-p2p-communication"
    if c.has(flush) and c.has(off):
        yield c.lint("conflict", f"{flush} and {off} cancel each other", "keep one", flush)
    count = c.micro_batches
    if c.interleaved and count is not None:
        group = c.number("--microbatch-group-size-per-virtual-pipeline-stage", c.pp)
        if not c.pp <= group <= max(count, c.pp):
            message = f"rounds of {group} micro-batches with pp = {c.pp} and {count} micro-batches"
            fix = f"take {c.pp} to {count}"
            yield c.lint("conflict", message, fix, "--microbatch-group-size-per-virtual-pipeline-stage")
        elif count < c.pp or 0 < count % group < c.pp:
            message = f"{count} micro-batches do not make rounds of {group} with pp = {c.pp} and virtual stages"
            yield c.lint(
                "conflict", message, f"take a multiple of {c.pp} (the parser lets it through)", "--global-batch-size"
            )
    if c.interleaved and c.pp == 2 and c.has(off):
        yield c.lint("conflict", f"virtual stages over two ranks with {off}", f"leave {off} out", off)


def _layers(c: Config) -> Iterator[Lint]:
    layers, stages = c.script.number("--num-layers"), stages_of(c.script)
    uneven = c.has("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
    if layers is None or c.pp == 1:
        return
    flag = "--pipeline-model-parallel-layout"
    if stages:
        if sum(stages) != layers:
            yield c.lint("conflict", f"the layout has {sum(stages)} layers of {layers}", "make them agree", flag)
        if len(stages) % c.pp:
            message = f"the layout has {len(stages)} stages for pp = {c.pp}"
            yield c.lint("conflict", message, "take a multiple", flag)
        return
    if uneven:
        return
    extra = c.has("--account-for-embedding-in-pipeline-split") + c.has("--account-for-loss-in-pipeline-split")
    if (layers + extra) % c.pp:
        yield c.lint(
            "conflict", f"{layers + extra} layers do not divide by pp = {c.pp}", "take a divisor", "--num-layers"
        )
        return
    each = c.script.number("--num-layers-per-virtual-pipeline-stage")
    per_stage = (layers + extra) // c.pp
    virtual = c.script.number("--num-virtual-stages-per-pipeline-rank")
    for count, flag in (
        (each, "--num-layers-per-virtual-pipeline-stage"),
        (virtual, "--num-virtual-stages-per-pipeline-rank"),
    ):
        if count and per_stage % count:
            yield c.lint("conflict", f"{per_stage} layers of a stage do not divide by {count}", "take a divisor", flag)


def expert_rule(c: Config) -> Iterator[Lint]:
    """Experts: their grid, their exchanges and what overlaps those."""
    experts = c.script.number("--num-experts")
    flag = "--expert-model-parallel-size"
    if c.ep > 1 and not experts:
        yield c.lint("conflict", f"ep = {c.ep} without --num-experts", "give the experts, or ep = 1", flag)
    elif experts and experts % c.ep:
        yield c.lint("conflict", f"{experts} experts do not divide by ep = {c.ep}", "take a divisor", flag)
    grid = c.etp * c.ep * c.pp
    if c.world_size and c.world_size % (c.tp * c.cp * c.pp) == 0 and c.world_size % grid:
        message = f"{c.world_size} ranks do not divide by etp x ep x pp = {grid}: the expert grid has no cp"
        yield c.lint("conflict", message, "take other degrees (the parser lets it through)", flag)
    if c.ep > 1 and c.tp > 1 and not c.sequence_parallel:
        message = (
            f"ep = {c.ep} with tp = {c.tp} and no sequence parallelism: tensor-parallel ranks dispatch the same tokens"
        )
        yield c.lint("conflict", message, "add --sequence-parallel", flag)
    if c.pairs:
        yield from _pairs(c)
    delay, dispatch = "--delay-wgrad-compute", "--overlap-dispatch-backward-with-experts-wgrad"
    if c.has(delay) and not c.pairs:
        message = f"{delay} without --overlap-moe-expert-parallel-comm: nothing runs in its place"
        yield c.lint("conflict", message, "add it, or leave this out", delay)
    if c.has(dispatch) and (c.pairs or c.has(delay)):
        message = f"{dispatch} excludes --overlap-moe-expert-parallel-comm and {delay}"
        yield c.lint("conflict", message, "keep one kind", dispatch)
    shared = "--moe-shared-expert-overlap"
    if c.has(shared) and c.value("--moe-token-dispatcher-type", "allgather") == "allgather":
        yield c.lint("conflict", f"{shared} needs an exchange: the dispatcher gathers", "take alltoall or flex", shared)
    if c.value("--moe-token-dispatcher-type") == "flex" and c.has("--moe-pad-expert-input-to-capacity"):
        message = "--moe-pad-expert-input-to-capacity with the flex dispatcher"
        yield c.lint("conflict", message, "leave it out", "--moe-pad-expert-input-to-capacity")


def _pairs(c: Config) -> Iterator[Lint]:
    flag = "--overlap-moe-expert-parallel-comm"
    if c.ep == 1:
        yield c.lint("conflict", f"{flag} with ep = 1: nothing is exchanged", "leave it out", flag)
    if c.value("--moe-token-dispatcher-type", "allgather") == "allgather":
        yield c.lint("conflict", f"{flag} with a dispatcher that gathers", "take alltoall or flex", flag)
    if c.pp > 1 and not c.interleaved:
        message = f"{flag} with pp = {c.pp} and no virtual stages: forwards and backwards come from different chunks"
        yield c.lint("conflict", message, "add --num-virtual-stages-per-pipeline-rank", flag)
    if c.value("--recompute-granularity") == "full":
        yield c.lint("conflict", f"{flag} with full recompute", "take selective recompute", "--recompute-granularity")
    modules = c.script.by_flag.get("--recompute-modules")
    if modules is not None and "moe" in modules.values:
        yield c.lint("conflict", f"{flag} with recompute of moe", "take moe_act instead", "--recompute-modules")
    if c.has("--moe-shared-expert-overlap"):
        message = f"{flag} and --moe-shared-expert-overlap fill the same time"
        yield c.lint("conflict", message, "leave the second out", "--moe-shared-expert-overlap")
    if not c.has("--bf16", "--fp16"):
        yield c.lint("conflict", f"{flag} needs bf16 or fp16", "add --bf16", flag)


def recompute_rule(c: Config) -> Iterator[Lint]:
    """Recompute: what needs what."""
    granularity = "--recompute-granularity"
    if c.value(granularity) == "full" and not (c.has("--recompute-method") and c.has("--recompute-num-layers")):
        message = "full recompute without --recompute-method and --recompute-num-layers"
        yield c.lint("conflict", message, "add both, such as uniform and 1", granularity)
    if c.value(granularity) == "selective" and c.has("--recompute-method"):
        yield c.lint("conflict", "--recompute-method with selective recompute", "leave it out", "--recompute-method")
