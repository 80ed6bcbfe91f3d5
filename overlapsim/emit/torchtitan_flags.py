"""Settings of torchtitan by section and version.

Two dialects: sections of a TOML file up to 0.2.2, attributes of a ``Trainer.Config`` in Python from 0.3.0 on. Read in
the sources of 0.2.2 and 0.3.0 and tried with their parsers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from overlapsim.emit.rules import Flag, Version

LAST_TOML: Final = Version.parse("0.2.2")
FIRST_PYTHON: Final = Version.parse("0.3.0")

_AFTER_TOML: Final = "0.3.0"
_P: Final = "parallelism."
FLAGS: Final[Mapping[str, Flag]] = {
    "model": Flag("model.name", until=_AFTER_TOML),
    "flavor": Flag("model.flavor", until=_AFTER_TOML),
    "converters": Flag("model.converters", "list", until=_AFTER_TOML),
    "local_batch": Flag("training.local_batch_size"),
    "global_batch": Flag("training.global_batch_size"),
    "seq_len": Flag("training.seq_len"),
    "no_graphs": Flag("training.disable_cuda_graphs", since=_AFTER_TOML),
    "replicate": Flag(_P + "data_parallel_replicate_degree"),
    "shard": Flag(_P + "data_parallel_shard_degree"),
    "reshard": Flag(_P + "fsdp_reshard_after_forward", choices=("default", "always", "never")),
    "tp": Flag(_P + "tensor_parallel_degree"),
    "sequence_parallel": Flag(_P + "enable_sequence_parallel", since=_AFTER_TOML),
    "pp": Flag(_P + "pipeline_parallel_degree"),
    "schedule": Flag(_P + "pipeline_parallel_schedule"),
    "schedule_csv": Flag(_P + "pipeline_parallel_schedule_csv"),
    "micro_batch": Flag(_P + "pipeline_parallel_microbatch_size"),
    "layers_per_stage": Flag(_P + "pipeline_parallel_layers_per_stage"),
    "first_less": Flag(_P + "pipeline_parallel_first_stage_less_layers"),
    "last_less": Flag(_P + "pipeline_parallel_last_stage_less_layers"),
    "parts": Flag(_P + "module_fqns_per_model_part", "list"),
    "pair_overlap": Flag(_P + "pipeline_parallel_expert_parallel_overlap", until=_AFTER_TOML),
    "cp": Flag(_P + "context_parallel_degree"),
    "cp_rotate": Flag(_P + "context_parallel_rotate_method", until=_AFTER_TOML, choices=("allgather", "alltoall")),
    "ep": Flag(_P + "expert_parallel_degree"),
    "etp": Flag(_P + "expert_tensor_parallel_degree", until=_AFTER_TOML),
    "async_tp": Flag(
        "compile.enable_async_tensor_parallel", since=_AFTER_TOML, before=_P + "enable_async_tensor_parallel"
    ),
    "compile": Flag("compile.enable"),
    "compiled": Flag("compile.components", "list"),
    "recompute": Flag("activation_checkpoint.mode", choices=("none", "selective", "full")),
    "recompute_option": Flag("activation_checkpoint.selective_ac_option", until=_AFTER_TOML),
    "fp8_recipe": Flag("quantize.linear.float8.recipe_name", until=_AFTER_TOML),
}
"""By neutral name. In Python ``activation_checkpoint.mode`` stands for a policy object."""


def settled(version: Version) -> Version:
    """The dialect's version: what lies between the last TOML and the first Python release is read as the latter."""
    return version if version <= LAST_TOML else max(version, FIRST_PYTHON)
