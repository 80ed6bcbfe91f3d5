"""Keys of DeepSpeed's configuration, as 0.19.8 reads, refuses or forgets them (its sources, tried with its parser)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TOP: Final = _names(
    "activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comms_logger communication_data_type compile "
    "csv_monitor data_efficiency data_types dataloader_drop_last disable_allgather disable_python_gc "
    "dump_state expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op "
    "gradient_clipping gradient_predivide_factor hybrid_engine legacy_fusion load_universal_checkpoint log_level "
    "managed_gradient_accumulation memory_breakdown optimizer pipeline prescale_gradients scheduler "
    "seq_parallel_communication_data_type sequence_parallel_size steps_per_print tensor_parallel tensorboard "
    "timers torch_autocast train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism "
    "vocabulary_size wall_clock_breakdown wandb weight_quantization zenflow zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer zero_optimization tensor_core_align_size comet datastates"
)
"""At the top; anything else is not read, without a word."""
ZERO: Final = _names(
    "allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients cpu_offload "
    "cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks ignore_unused_parameters "
    "leaf_module legacy_stage1 load_from_fp32_weights log_trace_cache_warnings memory_efficient_linear "
    "offload_optimizer offload_param overlap_comm override_module_apply parameter_alignment "
    "pipeline_loading_checkpoint reduce_bucket_size reduce_scatter round_robin_gradients "
    "save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential "
    "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters "
    "stage3_max_reuse_distance stage3_model_persistence_threshold stage3_module_granularity_threshold "
    "stage3_param_persistence_threshold stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params "
    "sub_group_size use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size zero_quantized_gradients "
    "zero_quantized_nontrainable_weights zero_quantized_weights"
)
"""In ``zero_optimization``; anything else is an error."""
ZERO_COUNTS: Final = (
    *("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"),
    *("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
    *("sub_group_size", "zero_hpz_partition_size"),
)
"""Counts of elements (of ranks, the last): whole numbers."""
REMOVED: Final[Mapping[str, str]] = {
    "nebula": "leave it out; checkpoints are torch's",
    "compression_training": "leave it out",
    "amp": "take bf16, fp16 or torch_autocast",
    "quantize_training": "leave it out",
    "sparse_gradients": "leave it out",
    "eigenvalue": "leave it out",
    "sparse_attention": "leave it out",
    "elasticity": "give the three batch sizes",
    "graph_harvesting": "leave it out",
    "curriculum_learning": "take data_efficiency.data_sampling.curriculum_learning",
    "progressive_layer_drop": "leave it out",
}
"""Top-level keys that stop it, and what to do instead."""
REMOVED_ZERO: Final[Mapping[str, str]] = {
    "mics_shard_size": "take zero_hpz_partition_size to gather parameters within a node",
    "mics_hierarchical_params_gather": "leave it out",
    "zeropp_loco_param": "leave it out",
}
"""Keys of ``zero_optimization`` that stop it."""
