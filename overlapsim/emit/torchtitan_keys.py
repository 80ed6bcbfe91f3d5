"""Keys of the sections of torchtitan's configs that are checked (sources of 0.2.2 and 0.3.0)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from overlapsim.emit.rules import Version
from overlapsim.emit.torchtitan_flags import LAST_TOML

_BOTH: Final[Mapping[str, str]] = {
    "training": (
        "local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload dtype mixed_precision_param "
        "mixed_precision_reduce gc_freq gc_debug"
    ),
    "parallelism": (
        "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward tensor_parallel_degree "
        "pipeline_parallel_degree module_fqns_per_model_part pipeline_parallel_first_stage_less_layers "
        "pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage pipeline_parallel_schedule "
        "pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size context_parallel_degree "
        "context_parallel_load_balancer expert_parallel_degree"
    ),
    "compile": "enable components backend",
    "activation_checkpoint": "mode",
}
_TOML: Final[Mapping[str, str]] = {
    "training": "dataset dataset_path dataloader",
    "parallelism": (
        "disable_loss_parallel enable_async_tensor_parallel pipeline_parallel_expert_parallel_overlap "
        "context_parallel_rotate_method expert_tensor_parallel_degree expert_parallel_comm_backend"
    ),
    "compile": "",
    "activation_checkpoint": (
        "selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop memory_budget "
        "visualize_memory_budget_pareto preserve_rng_state determinism_check debug"
    ),
}
_PYTHON: Final[Mapping[str, str]] = {
    "training": "disable_cuda_graphs",
    "parallelism": "enable_fsdp_symm_mem enable_sequence_parallel spmd_backend context_parallel_ptrr_mask_key",
    "compile": "enable_async_tensor_parallel",
    "activation_checkpoint": "",
}


def known_keys(section: str, version: Version) -> frozenset[str] | None:
    """Keys of a section, or None for sections that are not checked.

    Examples
    --------
    >>> "enable_async_tensor_parallel" in known_keys("compile", Version.parse("0.2.2"))
    False
    """
    if section not in _BOTH:
        return None
    more = _TOML if version <= LAST_TOML else _PYTHON
    return frozenset(f"{_BOTH[section]} {more[section]}".split())
