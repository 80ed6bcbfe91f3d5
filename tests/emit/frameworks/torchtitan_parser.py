"""Run by a Python that has torchtitan: parse configs with its own parser and print what each became, a line of JSON."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

DEGREES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
}


def main(path: Path, world_size: int, num_layers: int) -> dict[str, Any]:
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims

    if path.suffix == ".toml":
        config = ConfigManager().parse_args(["--job.config_file", str(path)])
        from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part as modules

        more = {"etp": config.parallelism.expert_tensor_parallel_degree}
    else:
        # Modules of the same name stand in the folders of several plans.
        sys.path.insert(0, str(path.parent))
        sys.modules.pop(path.stem, None)
        config = ConfigManager().parse_args(["--module", path.stem, "--config", "plan"])
        from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part as modules

        more = {}
    settings = config.parallelism
    degrees = {name: getattr(settings, key) for name, key in DEGREES.items()}
    dims = ParallelDims(**degrees, **more, world_size=world_size)
    stages = settings.module_fqns_per_model_part
    if settings.pipeline_parallel_degree > 1 and stages is None:
        first, last = (getattr(settings, f"pipeline_parallel_{end}_stage_less_layers") for end in ("first", "last"))
        number = -(-(num_layers + first + last) // settings.pipeline_parallel_layers_per_stage)
        stages = modules(number, num_layers, first, last)
    policy = config.activation_checkpoint
    compiled = config.compile
    return {
        "version": version("torchtitan"),
        "degrees": degrees,
        "dims": {name: getattr(dims, name) for name in degrees},
        "training": [config.training.local_batch_size, config.training.global_batch_size, config.training.seq_len],
        "micro_batch": settings.pipeline_parallel_microbatch_size,
        "schedule": settings.pipeline_parallel_schedule,
        "schedule_csv": settings.pipeline_parallel_schedule_csv,
        "reshard": settings.fsdp_reshard_after_forward,
        "layers": None if stages is None else [sum("layers." in name for name in part) for part in stages],
        "recompute": getattr(policy, "mode", None if policy is None else type(policy).__qualname__.split(".")[0]),
        "async_tp": getattr(settings, "enable_async_tensor_parallel", False)
        or getattr(compiled, "enable_async_tensor_parallel", False),
        "compile": compiled.enable,
    }


if __name__ == "__main__":
    for place in range(1, len(sys.argv), 3):
        print(json.dumps(main(Path(sys.argv[place]), int(sys.argv[place + 1]), int(sys.argv[place + 2]))))
