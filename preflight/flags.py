"""Names of Megatron's options: one canonical spelling for the ways they are written.

Canonical is Megatron-LM's flag without dashes ("num-virtual-stages-per-pipeline-rank"). A
Megatron-Bridge path ("ddp.nccl_ub") or a config field ("virtual_pipeline_model_parallel_size")
is brought to it. Sources: megatron/training/arguments.py and megatron/core/transformer/
transformer_config.py (0.16.1, 0.19.2), Megatron-Bridge src/megatron/bridge/training/config.py.

The other way, `launch_flag` and `bridge_path` give the name that the framework itself takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# field or alias -> canonical flag
SYNONYMS = {
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
    "num-layers-in-first-pipeline-stage": "decoder-first-pipeline-num-layers",
    "num-layers-in-last-pipeline-stage": "decoder-last-pipeline-num-layers",
    "nccl-ub": "use-nccl-ub",
    "num-moe-experts": "num-experts",
    "fp8": "fp8-format",
    "fp4": "fp4-format",
    "microbatch-group-size-per-vp-stage": "microbatch-group-size-per-virtual-pipeline-stage",
    "layernorm-epsilon": "norm-epsilon",
    "gated-linear-unit": "swiglu",
    "use-cpu-offloading": "cpu-offloading",
    "tensor-parallel-size": "tensor-model-parallel-size",
    "pipeline-parallel-size": "pipeline-model-parallel-size",
    "expert-parallel-size": "expert-model-parallel-size",
    "seq-len": "seq-length",
    "encoder-seq-length": "seq-length",
}

# field -> (canonical flag of the opposite sense)
NEGATED = {
    "share-embeddings-and-output-weights": "untie-embeddings-and-output-weights",
    "add-bias-linear": "disable-bias-linear",
    "gradient-accumulation-fusion": "no-gradient-accumulation-fusion",
}

# Flags of Megatron-LM that only say "on" for another flag's value.
CUDA_GRAPH_ALIASES = {
    # `--enable-cuda-graph` and `--external-cuda-graph` became `--cuda-graph-impl` values
    "enable-cuda-graph": "local",
    "external-cuda-graph": "transformer_engine",
}


def canonical(key: str) -> tuple[str, bool]:
    """The canonical flag for a key as typed, and whether its sense is reversed.

    >>> canonical("ddp.nccl_ub"), canonical("--tensor_model_parallel_size")
    (('use-nccl-ub', False), ('tensor-model-parallel-size', False))

    Whether a dotted path is one that the checks read is `bridge_flag`'s to say.

    >>> canonical("model.share_embeddings_and_output_weights")
    ('untie-embeddings-and-output-weights', True)
    """
    name = key.strip().lstrip("-").rsplit(".", 1)[-1].replace("_", "-")
    if name in NEGATED:
        return NEGATED[name], True
    return SYNONYMS.get(name, name), False


# canonical flag -> config field, where it is not the flag with underscores
_FIELDS = {
    SYNONYMS[name]: name.replace("-", "_")
    for name in (
        "virtual-pipeline-model-parallel-size",
        "num-layers-in-first-pipeline-stage",
        "num-layers-in-last-pipeline-stage",
        "nccl-ub",
        "num-moe-experts",
        "fp8",
        "fp4",
        "microbatch-group-size-per-vp-stage",
        "layernorm-epsilon",
    )
}


def launch_flag(key: str) -> str:
    """The flag that Megatron-LM's parser takes, without dashes, for a key as typed.

    >>> launch_flag("virtual_pipeline_model_parallel_size"), launch_flag("--my_own_flag")
    ('num-virtual-stages-per-pipeline-rank', 'my-own-flag')
    """
    name = key.strip().lstrip("-").replace("_", "-")
    return SYNONYMS.get(name, name)


# -- Megatron-Bridge ---------------------------------------------------------------------------

# Sections of ConfigContainer that the checks read, strongest first: where two give the same
# field, the earlier one counts.
# Source: Megatron-Bridge src/megatron/bridge/training/config.py, ConfigContainer (003e863ad19f).
BRIDGE_SECTIONS = tuple(
    "model ddp optimizer comm_overlap mixed_precision train dataset checkpoint scheduler logger "
    "tokenizer peft rng dist profiling".split()
)

# Where a bare field belongs. Model: megatron/core/transformer/transformer_config.py,
# model_parallel_config.py, and Megatron-Bridge models/gpt_provider.py (vocab and embedding);
# ddp: distributed/distributed_data_parallel_config.py; optimizer: optimizer/optimizer_config.py
# (megatron-core 0.16.1); train: megatron/training/config/training_config.py (0.19.2).
# fp16 and bf16 stand in several sections and are left as typed.
_SECTION_FIELDS = {
    "model": """tensor_model_parallel_size pipeline_model_parallel_size
    virtual_pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
    expert_tensor_parallel_size sequence_parallel microbatch_group_size_per_vp_stage
    pipeline_model_parallel_layout num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split overlap_p2p_comm batch_p2p_comm
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
    gated_linear_unit normalization layernorm_epsilon qk_layernorm add_bias_linear add_qkv_bias
    hidden_dropout attention_dropout mtp_num_layers multi_latent_attention
    num_moe_experts moe_ffn_hidden_size moe_router_topk moe_shared_expert_intermediate_size
    moe_layer_freq moe_grouped_gemm moe_token_dispatcher_type moe_flex_dispatcher_backend
    moe_enable_deepep moe_permute_fusion moe_layer_recompute
    seq_length vocab_size make_vocab_size_divisible_by share_embeddings_and_output_weights
    position_embedding_type rotary_base
    fp8 fp8_recipe fp4 deterministic_mode attention_backend transformer_impl
    gradient_accumulation_fusion cross_entropy_loss_fusion cross_entropy_fusion_impl
    recompute_granularity recompute_method recompute_num_layers recompute_modules
    distribute_saved_activations cpu_offloading cpu_offloading_num_layers
    cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering
    fine_grained_activation_offloading offload_modules min_offloaded_tensor_size
    overlap_moe_expert_parallel_comm tp_comm_overlap
    cuda_graph_impl cuda_graph_scope cuda_graph_warmup_steps enable_cuda_graph
    external_cuda_graph""",
    "ddp": """grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather align_param_gather
    use_distributed_optimizer num_distributed_optimizer_instances check_for_nan_in_grad
    bucket_size average_in_collective fp8_param_gather use_megatron_fsdp use_custom_fsdp
    data_parallel_sharding_strategy nccl_ub fsdp_double_buffer""",
    "optimizer": """optimizer lr min_lr weight_decay clip_grad adam_beta1 adam_beta2 adam_eps
    use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype
    exp_avg_sq_dtype optimizer_cpu_offload optimizer_offload_fraction
    overlap_cpu_optimizer_d2h_h2d use_torch_optimizer_for_cpu_offload
    overlap_param_gather_with_optimizer_step""",
    "train": """micro_batch_size global_batch_size rampup_batch_size
    decrease_batch_size_if_needed train_iters train_samples exit_interval exit_duration_in_mins
    exit_signal_handler manual_gc manual_gc_interval empty_unused_memory_level""",
}
SECTION_OF = {name: section for section, names in _SECTION_FIELDS.items() for name in names.split()}
_UNNEGATED = {flag: name.replace("-", "_") for name, flag in NEGATED.items()}


def _bridge_field(word: str) -> tuple[str, bool]:
    """The config field for a field or a Megatron-LM flag, and whether its sense is reversed."""
    plain = word.replace("-", "_")
    if plain in SECTION_OF:
        return plain, False
    flag = launch_flag(word)
    if flag in _UNNEGATED:
        return _UNNEGATED[flag], True
    return field(flag), False


def bridge_path(key: str) -> tuple[str, bool]:
    """The override path that Megatron-Bridge takes for a key as typed; is its sense reversed?

    A bare field goes into its section; nested paths and unknown names stay as typed.

    >>> bridge_path("nccl-ub"), bridge_path("model.num-layers")
    (('ddp.nccl_ub', False), ('model.num_layers', False))
    >>> bridge_path("disable-bias-linear"), bridge_path("model.vision_config.num_layers")
    (('model.add_bias_linear', True), ('model.vision_config.num_layers', False))
    """
    name = key.strip().lstrip("-")
    prefix = name[: len(name) - len(name.lstrip("+"))]  # Hydra's "add"
    name = name.lstrip("+")
    head, _, last = name.rpartition(".")
    if head and head not in BRIDGE_SECTIONS:
        return prefix + name, False
    known, reverse = _bridge_field(last)
    section = SECTION_OF.get(known)
    if section is not None and head in ("", section):
        return f"{prefix}{section}.{known}", reverse
    return prefix + (f"{head}.{last.replace('-', '_')}" if head else name), False


def bridge_flag(path: str) -> tuple[str, bool, int] | None:
    """Canonical flag, reversed sense and rank of a path that the checks read, else None.

    Rank 0 is strongest. Nested configs (`model.vision_config`) are another model's.

    >>> bridge_flag("ddp.nccl_ub"), bridge_flag("model.vision_config.num_layers")
    (('use-nccl-ub', False, 1), None)
    """
    head, _, last = path.lstrip("+").rpartition(".")
    if head and head not in BRIDGE_SECTIONS:
        return None
    rank = BRIDGE_SECTIONS.index(head) if head else len(BRIDGE_SECTIONS)
    return *canonical(last), rank


def flatten(
    arguments: Mapping[str, Any], base: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Nested mappings as dotted keys: (key, value, the path in the file).

    >>> [key for key, _, _ in flatten({"model": {"num_layers": 4, "a": {"b": 1}}, "c": {}})]
    ['model.num_layers', 'model.a.b', 'c']
    """
    for key, value in arguments.items():
        path = (*base, key)
        if isinstance(value, Mapping) and value:
            for inner, item, where in flatten(value, path):
                yield f"{key}.{inner}", item, where
        else:
            yield key, value, path


def field(flag: str) -> str:
    """The config field of a canonical flag, as Megatron-Bridge spells it.

    >>> field("num-virtual-stages-per-pipeline-rank"), field("micro-batch-size")
    ('virtual_pipeline_model_parallel_size', 'micro_batch_size')
    """
    return _FIELDS.get(flag, flag.replace("-", "_"))
