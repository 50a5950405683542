"""Shapes of known models, as Megatron-LM's own flags. `args` of a job file win over them.

Dimensions are those of the published config.json of each model; `vocab-size` is before Megatron
pads it.
"""

from __future__ import annotations

from typing import Any

# What two of these models do not share (rotary-base, norm-epsilon, max-position-embeddings) stands
# with each; Megatron-LM's own defaults are 10000 and 1e-5.
_LLAMA: dict[str, Any] = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position-embedding-type": "rope",
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
    "attention-dropout": 0.0,
    "hidden-dropout": 0.0,
}


def _llama(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, **more: Any
) -> dict[str, Any]:
    shape = {
        "num-layers": layers,
        "hidden-size": hidden,
        "ffn-hidden-size": ffn,
        "num-attention-heads": heads,
        "vocab-size": vocab,
        **_LLAMA,
    }
    if groups != heads:
        shape |= {"group-query-attention": True, "num-query-groups": groups}
    return shape | {key.replace("_", "-"): value for key, value in more.items()}


def _gpt3(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    # Brown et al. 2020, table 2.1; GPT-2's BPE vocabulary
    return {
        "num-layers": layers,
        "hidden-size": hidden,
        "num-attention-heads": heads,
        "vocab-size": 50257,
        "max-position-embeddings": 2048,
    }


_LLAMA2 = {"max_position_embeddings": 4096, "norm_epsilon": 1e-5}
_LLAMA3 = {"max_position_embeddings": 8192, "norm_epsilon": 1e-5, "rotary_base": 500000}
_LLAMA31 = {**_LLAMA3, "max_position_embeddings": 131072, "use_rope_scaling": True}
_MISTRAL = {"max_position_embeddings": 32768, "norm_epsilon": 1e-5}  # v0.1
_QWEN25 = {"max_position_embeddings": 131072, "norm_epsilon": 1e-6, "rotary_base": 1000000}
_QWEN3: dict[str, Any] = {
    "max_position_embeddings": 40960,
    "norm_epsilon": 1e-6,
    "rotary_base": 1000000,
    "kv_channels": 128,
    "qk_layernorm": True,
}

MODELS: dict[str, dict[str, Any]] = {
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "gpt3-13b": _gpt3(40, 5120, 40),
    "gpt3-175b": _gpt3(96, 12288, 96),
    "llama2-7b": _llama(32, 4096, 11008, 32, 32, 32000, **_LLAMA2),
    "llama2-13b": _llama(40, 5120, 13824, 40, 40, 32000, **_LLAMA2),
    "llama2-70b": _llama(80, 8192, 28672, 64, 8, 32000, **_LLAMA2),
    "llama3-8b": _llama(32, 4096, 14336, 32, 8, 128256, **_LLAMA3),
    "llama3-70b": _llama(80, 8192, 28672, 64, 8, 128256, **_LLAMA3),
    "llama3.1-405b": _llama(126, 16384, 53248, 128, 8, 128256, **_LLAMA31),
    "mistral-7b": _llama(32, 4096, 14336, 32, 8, 32000, **_MISTRAL),
    "qwen2.5-7b": _llama(28, 3584, 18944, 28, 4, 152064, add_qkv_bias=True, **_QWEN25),
    "qwen3-8b": _llama(36, 4096, 12288, 32, 8, 151936, **_QWEN3),
    "qwen3-32b": _llama(64, 5120, 25600, 64, 8, 151936, **_QWEN3),
}
