"""Megatron Bridge's overrides of a plan: a function that sets a recipe's sections, and its overlap config."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from overlapsim.emit.base import Emitted, Emitter, Subject, comment
from overlapsim.emit.megatron import run_of, sheet_of
from overlapsim.emit.megatron_env import QUEUES, env_text, queues
from overlapsim.emit.megatron_layout import stages_text
from overlapsim.emit.rules import FRAMEWORKS, Scalar, Sheet, Version
from overlapsim.emit.userbuffers import Userbuffers, userbuffers

FILE: Final = "megatron_bridge.py"
CORE: Final = "0.19"
"""Megatron-Core whose arguments stand for what the library passes on."""
CLASSES: Final = {"ring_exchange": "RingExchangeOverlapCfg", "pipeline": "PipelineOverlapCfg", "bulk": "BulkOverlapCfg"}
_KEYS: Final = {
    "ring_exchange": ("aggregate", "num_sm", "cga_size", "set_sm_margin", "fp8_buf", "atomic_gemm"),
    "pipeline": ("num_sm", "cga_size", "num_splits", "set_sm_margin", "fp8_buf", "atomic_gemm"),
    "bulk": ("num_sm", "cga_size", "set_sm_margin"),
}
_GEMMS: Final = (
    *("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad", "qkv_fprop"),
    *("proj_dgrad", "fc1_fprop", "fc2_dgrad", "proj_fprop", "fc2_fprop"),
)
"""All are required; None leaves one to Transformer Engine."""
_MODEL: Final = {
    "--tensor-model-parallel-size": "tensor_model_parallel_size",
    "--sequence-parallel": "sequence_parallel",
    "--pipeline-model-parallel-size": "pipeline_model_parallel_size",
    "--num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    "--context-parallel-size": "context_parallel_size",
    "--hierarchical-context-parallel-sizes": "hierarchical_context_parallel_sizes",
    "--cp-comm-type": "cp_comm_type",
    "--expert-model-parallel-size": "expert_model_parallel_size",
    "--expert-tensor-parallel-size": "expert_tensor_parallel_size",
    "--moe-token-dispatcher-type": "moe_token_dispatcher_type",
    "--moe-flex-dispatcher-backend": "moe_flex_dispatcher_backend",
    "--moe-shared-expert-overlap": "moe_shared_expert_overlap",
    "--recompute-granularity": "recompute_granularity",
    "--recompute-method": "recompute_method",
    "--recompute-num-layers": "recompute_num_layers",
    "--recompute-modules": "recompute_modules",
    "--overlap-p2p-communication-warmup-flush": "overlap_p2p_comm_warmup_flush",
    "--seq-length": "seq_length",
}
_TRAIN: Final = {"--micro-batch-size": "micro_batch_size", "--global-batch-size": "global_batch_size"}
_DDP: Final = {
    "--use-distributed-optimizer": "use_distributed_optimizer",
    "--use-megatron-fsdp": "use_megatron_fsdp",
    "--data-parallel-sharding-strategy": "data_parallel_sharding_strategy",
    "--num-distributed-optimizer-instances": "num_distributed_optimizer_instances",
}
_SECTIONS: Final[Mapping[str, Mapping[str, str]]] = {"model": _MODEL, "train": _TRAIN, "ddp": _DDP}


class MegatronBridge(Emitter):
    """Degrees, batches, sharding and overlap; the model itself is the recipe's."""

    name = "megatron_bridge"
    framework = "megatron_bridge"

    def write(self, subject: Subject, version: Version) -> Emitted:
        """Return the function's file and the environment."""
        sheet = sheet_of(subject, Version.parse(CORE))
        layout = subject.layout
        given = userbuffers(subject.entry.operators, layout, Version.parse(FRAMEWORKS["transformer_engine"].newest))
        overlapped = given.used
        left = [*sheet.unexpressed, *given.unexpressed]
        if given.scatter_with_dgrad and overlapped:
            left.append("tp_comm_overlap_rs_dgrad is set on the model, beside the overlap config")
        if any(not keys.get("use_ce", True) for keys in given.gemms.values()):
            left.append("rings on SMs: the overlap config has no use_ce, and copy engines move them")
        lines = [
            *(f"    {line}" for line in _sections(sheet, subject)),
            *(f"    {line}" for line in _overlap(subject, sheet, given, overlapped=overlapped)),
        ]
        env = f"environment: {QUEUES}=1" if queues(run_of(subject))[0] == "one" else f"environment: {QUEUES} unset"
        head = (*self.header(subject, version), env, *(f"not expressed: {sentence}" for sentence in left))
        text = comment(head) + _imports(given, overlapped=overlapped)
        text += '\n\ndef configure(config):\n    """Set a recipe\'s sections as planned."""\n'
        text += "".join(f"{line}\n" for line in lines) + "    return config\n"
        files = {FILE: text, "megatron_bridge.env": comment(self.header(subject, version)) + env_text(run_of(subject))}
        return Emitted(files, tuple(dict.fromkeys(left)))


def _sections(sheet: Sheet, subject: Subject) -> Iterator[str]:
    values = dict(sheet.lines)
    for section, names in _SECTIONS.items():
        for flag, name in names.items():
            if flag in values:
                yield f"config.{section}.{name} = {_python(flag, values[flag])}"
    if subject.settings.stage_layers:
        text = stages_text(subject.settings.stage_layers, subject.spec.num_mtp_layers)
        yield f"config.model.pipeline_model_parallel_layout = {_literal(text)}"
    if subject.layout.pp > 1:
        yield f"config.model.pipeline_dtype = {'torch.float16' if subject.spec.dtype == 'fp16' else 'torch.bfloat16'}"
    if "--use-tp-pp-dp-mapping" in values:
        yield "config.dist.use_tp_pp_dp_mapping = True"
    if "--use-megatron-fsdp" in values:
        yield "config.dist.use_megatron_fsdp = True"
        yield 'config.checkpoint.ckpt_format = "fsdp_dtensor"'


def _overlap(subject: Subject, sheet: Sheet, given: Userbuffers, *, overlapped: bool) -> Iterator[str]:
    values = dict(sheet.lines)
    if overlapped and given.gemms:
        yield "userbuffers = TransformerLayerTPOverlapCfg("
        for name in _GEMMS:
            keys = given.gemms.get(name)
            yield f"    {name}={'None' if keys is None else _gemm(keys)},"
        yield ")"
    if overlapped:
        if given.scatter_with_dgrad:
            yield "config.model.tp_comm_overlap_rs_dgrad = True"
        for kind, name in (("gather", "tp_comm_overlap_ag"), ("scatter", "tp_comm_overlap_rs")):
            if not getattr(given, kind):
                yield f"config.model.{name} = False"
    said: dict[str, Any] = {"tp_comm_overlap": overlapped}
    if subject.layout.pp > 1:
        said["overlap_p2p_comm"] = subject.layout.vpp > 1 and "--no-overlap-p2p-communication" not in values
        said["batch_p2p_comm"] = not said["overlap_p2p_comm"]
    if subject.layout.dp * subject.layout.context > 1:
        said["overlap_grad_reduce"] = "--overlap-grad-reduce" in values
        said["overlap_param_gather"] = "--overlap-param-gather" in values
        if "--ddp-bucket-size" in values:
            said["bucket_size"] = values["--ddp-bucket-size"][0]
    said["overlap_moe_expert_parallel_comm"] = "--overlap-moe-expert-parallel-comm" in values
    said["delay_wgrad_compute"] = "--delay-wgrad-compute" in values
    yield "config.comm_overlap = CommOverlapConfig("
    for name, value in said.items():
        yield f"    {name}={_literal(value)},"
        if name == "tp_comm_overlap" and overlapped and given.gemms:
            yield "    tp_comm_overlap_cfg=userbuffers,"
    yield ")"


def _imports(given: Userbuffers, *, overlapped: bool) -> str:
    names = {"CommOverlapConfig"}
    if overlapped and given.gemms:
        names |= {"TransformerLayerTPOverlapCfg"} | {CLASSES[keys["method"]] for keys in given.gemms.values()}
    lines = "".join(f"    {name},\n" for name in sorted(names))
    return f"import torch\nfrom megatron.bridge.training.comm_overlap import (\n{lines})\n"


def _gemm(keys: Mapping[str, Any]) -> str:
    method = keys["method"]
    return f"{CLASSES[method]}({', '.join(f'{key}={_literal(keys[key])}' for key in _KEYS[method])})"


def _python(flag: str, values: tuple[Scalar, ...]) -> str:
    if not values:
        return "True"
    many = flag in ("--recompute-modules", "--hierarchical-context-parallel-sizes")
    return _literal(list(values) if many else values[0])


def _literal(value: Any) -> str:
    return repr(value) if isinstance(value, bool | int | float) else json.dumps(value)


EMITTER: Final = MegatronBridge()
