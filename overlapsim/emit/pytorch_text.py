"""The text of PyTorch's module: one function a step of setting up, each only where the plan needs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from overlapsim.emit.base import Subject
from overlapsim.emit.rules import Version
from overlapsim.emit.torch_schedules import schedule_class, splits_backward

SYMMETRIC_UNTIL: Final = Version.parse("2.13")
"""From here on groups need no word to use symmetric memory."""
_TYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_MIB: Final = 2**20


def module_text(subject: Subject, version: Version, head: tuple[str, ...], actions: str | None) -> str:
    """The module.

    Parameters
    ----------
    actions : file of the schedule's actions, None where torch makes them
    """
    layout = subject.layout
    parts = [_mesh(subject)]
    if layout.tp > 1:
        parts.append(_SPLIT)
        if _async_tp(subject):
            parts.append(_async_text(version))
    if layout.dp * layout.cp > 1:
        parts.append(_replicas(subject) if replicated(subject) else _shards(subject))
    if layout.pp > 1:
        parts.append(_schedule(subject, actions))
    lines = "\n".join(head[1:])
    imports = "".join(
        sorted({line for text in parts for line in _imports(text)}, key=lambda line: (line[0] != "i", line))
    )
    return f'"""{head[0]}.\n\n{lines}\n"""\n\n{imports}\n{"".join(parts)}'


def _imports(text: str) -> Iterator[str]:
    """Imports of the names that a piece of text uses."""
    for name, line in _MODULES.items():
        if name in text:
            yield line + "\n"


_MODULES: Final = {
    "torch.": "import torch",
    "torch._inductor": "import torch._inductor.config",
    "init_device_mesh(": "from torch.distributed.device_mesh import init_device_mesh",
    "MixedPrecisionPolicy(": "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
    "parallelize_module(": (
        "from torch.distributed.tensor.parallel import (\n    ColwiseParallel,\n    RowwiseParallel,\n"
        "    SequenceParallel,\n    parallelize_module,\n)"
    ),
    "Shard(": "from torch.distributed.tensor import Shard",
    "DistributedDataParallel(": "from torch.nn.parallel import DistributedDataParallel",
    "get_schedule_class(": "from torch.distributed.pipelining.schedules import get_schedule_class",
    "_PipelineScheduleRuntime(": "from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime",
    "enable_symm_mem_for_group(": "from torch.distributed._symmetric_memory import enable_symm_mem_for_group",
}


def replicated(subject: Subject) -> bool:
    """Whether replicas hold all state: DDP, which goes together with no other degree here."""
    layout = subject.layout
    return layout.zero == 0 and layout.world_size == layout.dp


def _async_tp(subject: Subject) -> bool:
    asked = any(op.strategy == "async_tp" for op in subject.entry.operators)
    return asked and not splits_backward(subject.settings, subject.layout.pp)


def _mesh(subject: Subject) -> str:
    layout = subject.layout
    sizes = {"pp": layout.pp, "replicate": layout.hsdp, "shard": layout.dp // layout.hsdp, "cp": layout.cp}
    named = {name: size for name, size in {**sizes, "tp": layout.tp}.items() if size > 1} or {"shard": 1}
    if replicated(subject) and layout.dp > 1:
        named = {"replicate": layout.dp}
    inner = subject.settings
    rows = "".join(f'    "{name}": {size},\n' for name, size in named.items())
    return f'''
MESH = {{
{rows}}}
"""Degrees, the slowest first: neighbouring ranks differ in the last."""
STAGES_PER_RANK = {layout.vpp}
MICRO_BATCH = {inner.micro_batch}
NUM_MICRO_BATCHES = {inner.num_micro_batches}


def make_mesh(device="cuda"):
    """Mesh of all ranks."""
    return init_device_mesh(device, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
'''


_SPLIT: Final = '''

def split(block, mesh, columns, rows, norms):
    """Split one layer over the tensor-parallel ranks, by names of its modules; norms along the sequence."""
    styles = {name: ColwiseParallel(input_layouts=Shard(1)) for name in columns}
    styles |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in rows}
    styles |= {name: SequenceParallel() for name in norms}
    return parallelize_module(block, mesh["tp"], styles)
'''


def _async_text(version: Version) -> str:
    group = "" if version >= SYMMETRIC_UNTIL else '    enable_symm_mem_for_group(mesh["tp"].get_group().group_name)\n'
    return f'''

def compile_async_tp(block, mesh):
    """Compile one layer with its collectives pipelined into its products; after split(), before shard()."""
    torch._inductor.config._micro_pipeline_tp = True
{group}    return torch.compile(block, fullgraph=True)
'''


def _shards(subject: Subject) -> str:
    settings, layout = subject.settings, subject.layout
    reshard = layout.zero == 3 and settings.reshard
    ahead = max(1, _prefetched(subject))
    dtype = _TYPES.get(subject.spec.dtype, "bfloat16")
    return f'''

def shard(model, blocks, mesh):
    """Shard a model over its data-parallel ranks, layer by layer in the order of their forward."""
{_ranks(subject)}    policy = MixedPrecisionPolicy(param_dtype=torch.{dtype}, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=ranks, reshard_after_forward={reshard}, mp_policy=policy)
    fully_shard(model, mesh=ranks, reshard_after_forward={reshard}, mp_policy=policy)
    # Layers whose parameters are gathered while one computes.
    ahead = {ahead}
    for place, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(0, place - ahead) : place][::-1])
    return model
'''


def _ranks(subject: Subject) -> str:
    """Lines that name the ranks over which parameters are sharded, and copied in HSDP."""
    layout = subject.layout
    inner = [name for name, size in (("shard", layout.dp // layout.hsdp), ("cp", layout.cp)) if size > 1]
    outer = ["replicate"] if layout.hsdp > 1 else []
    if len(inner) < 2:
        named = ", ".join(f'"{name}"' for name in (*outer, *inner))
        return f"    ranks = mesh[{named}]\n"
    flat = 'mesh["shard", "cp"]._flatten("fsdp")'
    return f'    {flat}\n    ranks = mesh["replicate", "fsdp"]\n' if outer else f"    ranks = {flat}\n"


def _prefetched(subject: Subject) -> int:
    """Groups gathered ahead, by the plan's strategy; 0 where it has none."""
    for name, parameters in subject.settings.arranging:
        if name == "fsdp_prefetch":
            return int(parameters.get("depth", 2)) - 1
    return 0


def _replicas(subject: Subject) -> str:
    size = subject.settings.bucket_bytes / _MIB
    return f'''

def replicate(model, mesh):
    """Replicas that add up their gradients in buckets, beside the backward."""
    group = mesh["replicate"].get_group()
    return DistributedDataParallel(
        model, process_group=group, bucket_cap_mb={size:.6g}, gradient_as_bucket_view=True, static_graph=True
    )
'''


def _schedule(subject: Subject, actions: str | None) -> str:
    settings = subject.settings
    if actions is not None:
        return f'''

def make_schedule(stages, loss_fn, actions="{actions}"):
    """The pipeline's schedule, {settings.schedule}, for this rank's stages: its actions are in the file."""
    schedule = _PipelineScheduleRuntime(stages, n_microbatches=NUM_MICRO_BATCHES, loss_fn=loss_fn)
    schedule._load_csv(actions, format="compute_only")
    return schedule
'''
    many = "stages" if subject.layout.vpp > 1 else "stages[0]"
    return f'''

def make_schedule(stages, loss_fn):
    """The pipeline's schedule for this rank's stages."""
    return get_schedule_class("{schedule_class(settings)}")({many}, n_microbatches=NUM_MICRO_BATCHES, loss_fn=loss_fn)
'''
