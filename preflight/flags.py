"""Names of Megatron's options: one canonical spelling for the ways they are written.

Canonical is Megatron-LM's flag without dashes ("num-virtual-stages-per-pipeline-rank"). A
Megatron-Bridge path ("ddp.nccl_ub") or a config field ("virtual_pipeline_model_parallel_size")
is brought to it. Sources: megatron/training/arguments.py and megatron/core/transformer/
transformer_config.py (0.16.1, 0.19.2), Megatron-Bridge src/megatron/bridge/training/config.py.
"""

from __future__ import annotations

# field or alias -> canonical flag
SYNONYMS = {
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
    "num-layers-in-first-pipeline-stage": "decoder-first-pipeline-num-layers",
    "num-layers-in-last-pipeline-stage": "decoder-last-pipeline-num-layers",
    "nccl-ub": "use-nccl-ub",
    "num-moe-experts": "num-experts",
    "fp8": "fp8-format",
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
        "microbatch-group-size-per-vp-stage",
        "layernorm-epsilon",
    )
}


def field(flag: str) -> str:
    """The config field of a canonical flag, as Megatron-Bridge spells it.

    >>> field("num-virtual-stages-per-pipeline-rank"), field("micro-batch-size")
    ('virtual_pipeline_model_parallel_size', 'micro_batch_size')
    """
    return _FIELDS.get(flag, flag.replace("-", "_"))
