"""Components of an estimate: what people call them, and the group they belong to."""

from __future__ import annotations

from collections.abc import Mapping

STATE = "model state"
ACTIVATIONS = "activations"
LOSS = "loss"
BUFFERS = "buffers"
OUTSIDE = "outside PyTorch"

# component -> (words, group)
COMPONENTS: dict[str, tuple[str, str]] = {
    "frozen_weights": ("frozen weights", STATE),
    "weights": ("weights", STATE),
    "gradients": ("gradients", STATE),
    "optimizer_state": ("optimizer state", STATE),
    "gradient_copies": ("fp32 copies of gradients", STATE),
    "expert_weights": ("experts' weights", STATE),
    "expert_gradients": ("experts' gradients", STATE),
    "expert_optimizer_state": ("experts' optimizer state", STATE),
    "attention_activations": ("attention activations", ACTIVATIONS),
    "attention_scores": ("attention scores (unfused attention)", ACTIVATIONS),
    "mlp_activations": ("MLP activations", ACTIVATIONS),
    "moe_activations": ("experts' activations", ACTIVATIONS),
    "lora_inputs": ("inputs of LoRA adapters", ACTIVATIONS),
    "embedding_dropout_mask": ("dropout mask of the embedding", ACTIVATIONS),
    "recompute_inputs": ("inputs of recomputed layers", ACTIVATIONS),
    "recomputed_layers": ("layers being recomputed", ACTIVATIONS),
    "stage_inputs": ("inputs of pipeline stages", ACTIVATIONS),
    "final_norm": ("final norm", LOSS),
    "logits": ("logits", LOSS),
    "cross_entropy": ("cross entropy of the logits", LOSS),
    "deferred_logit_gradients": ("deferred gradients of the logits", LOSS),
    "library_workspaces": ("library workspaces", BUFFERS),
    "global_memory_buffer": ("Megatron's gather buffer", BUFFERS),
    "dummy_weight_gradients": ("placeholder weight gradients", BUFFERS),
    "lora_regather_buffers": ("buffers of LoRA re-gather", BUFFERS),
    "cuda_context": ("CUDA context", OUTSIDE),
    "nccl": ("NCCL buffers", OUTSIDE),
    "fragmentation": ("fragmentation", OUTSIDE),
}


def describe(name: str) -> str:
    return COMPONENTS[name][0]


def group_of(name: str, components: Mapping[str, int]) -> tuple[str, int]:
    """The group of a component, and the bytes of all its members."""
    group = COMPONENTS[name][1]
    return group, sum(size for one, size in components.items() if COMPONENTS[one][1] == group)
