"""Run an emitted Megatron Bridge file against the library's own overlap config, with stand-ins for model classes.

``python megatron_bridge_parser.py PACKAGES (WORLD FILE)...``: PACKAGES holds the wheel (``pip install --target``).
Prints a JSON line a file: the overlap config that the library settles on, or the error.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PARTS = ("model", "train", "ddp", "dist", "checkpoint")


def load(packages: Path) -> Any:
    """The library's module of overlap configs alone: the package proper needs far more."""
    from megatron_parser import load as megatron

    megatron(None)
    import megatron.core
    from megatron.core.distributed import DistributedDataParallelConfig  # noqa: F401

    root = packages / "megatron" / "bridge"
    for name, folder in (("megatron.bridge", root), ("megatron.bridge.training", root / "training")):
        module = types.ModuleType(name)
        module.__path__ = [str(folder)]
        sys.modules[name] = module
    utils = types.ModuleType("megatron.bridge.utils")
    utils.__path__ = [str(root / "utils")]
    sys.modules[utils.__name__] = utils
    for name, classes in (
        ("megatron.bridge.models", ("GPTModelProvider", "T5ModelProvider")),
        ("megatron.bridge.models.gpt", ()),
        ("megatron.bridge.models.gpt.gpt_builder", ("GPTModelConfig",)),
        ("megatron.bridge.models.hybrid", ()),
        ("megatron.bridge.models.hybrid.hybrid_builder", ("HybridModelConfig",)),
    ):
        module = types.ModuleType(name)
        for item in classes:
            setattr(module, item, type(item, (), {}))
        sys.modules[name] = module
    import megatron.bridge.training.comm_overlap as overlap

    overlap.HAVE_TE = True
    return overlap


def run(overlap: Any, world: int, path: Path) -> dict[str, Any]:
    """Configure stand-ins by a file and let the library settle."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    scope: dict[str, Any] = {}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), scope)
    config = SimpleNamespace(**{part: SimpleNamespace() for part in PARTS})
    config.ddp = DistributedDataParallelConfig()
    fields = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    known = {name: value for name, value in fields.items() if value is not dataclasses.MISSING}
    config.model = SimpleNamespace(**{**known, "num_moe_experts": 8, "bf16": True, "fp16": False})
    try:
        scope["configure"](config)
        m = config.model
        m.data_parallel_size = world // (
            m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size
        )
        settled = config.comm_overlap
        settled.data_parallel_size = m.data_parallel_size
        if hasattr(settled, "finalize"):
            settled.finalize()
        settled.setup(m, OptimizerConfig(use_distributed_optimizer=True), config.ddp)
    except Exception as error:
        return {"file": path.name, "error": f"{type(error).__name__}: {error}"}
    return {
        "file": path.name,
        "error": "",
        "tp_comm_overlap": m.tp_comm_overlap,
        "gemms": getattr(m, "tp_comm_overlap_cfg", None) or {},
        "ddp": {
            key: value
            for key, value in dataclasses.asdict(config.ddp).items()
            if key in ("overlap_grad_reduce", "overlap_param_gather", "bucket_size")
        },
    }


def main() -> None:
    """Run the files that are named."""
    logging.disable(logging.CRITICAL)
    packages, *pairs = sys.argv[1:]
    overlap = load(Path(packages))
    files = zip(pairs[::2], pairs[1::2], strict=True)
    for world, path in files:
        print(json.dumps(run(overlap, int(world), Path(path)), default=str))


if __name__ == "__main__":
    main()
