"""What the estimate does not model, and what it takes for granted, in words."""

from __future__ import annotations

from mtlaunch.preflight.memory import lora
from mtlaunch.preflight.memory.sizes import Sizes
from mtlaunch.preflight.memory.state import MOMENTS
from mtlaunch.preflight.plan import Plan

# Options that add, remove or move memory in ways that no formula here follows.
UNMODELLED_FLAGS = {
    "tp-comm-overlap": "user buffers of --tp-comm-overlap",
    "fp32-residual-connection": "--fp32-residual-connection",
    "delay-wgrad-compute": "--delay-wgrad-compute",
    "use-transformer-engine-op-fuser": "--use-transformer-engine-op-fuser",
    "heterogeneous-layers-config-path": "heterogeneous layers",
    "heterogeneous-layers-config-encoded-json": "heterogeneous layers",
    "spec": "a layer spec of one's own (--spec)",
    "experimental-attention-variant": "--experimental-attention-variant",
    "moe-expert-capacity-factor": "--moe-expert-capacity-factor",
    "hybrid-layer-pattern": "hybrid (Mamba) layers",
    "hybrid-override-pattern": "hybrid (Mamba) layers",
    "is-hybrid-model": "hybrid (Mamba) layers",
    "export-kd-teacher-load": "a distillation teacher",
    "variable-seq-lengths": "sequences of varying length",
    "skip-train": "--skip-train",
    "use-legacy-models": "--use-legacy-models",
}

# Modules that --recompute-modules may name and the formulas know.
RECOMPUTE_MODULES = {
    "core_attn",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "moe_act",
    "shared_experts",
}


def not_modelled(s: Sizes, layers_known: bool) -> tuple[str, ...]:
    """Features of the plan that the numbers leave out; any of them makes the verdict unknown."""
    plan = s.plan
    found = [words for name, words in UNMODELLED_FLAGS.items() if _given(plan, name)]
    if plan.fp8 or plan.fp4:
        found.append("fp8 and fp4 (counted as bf16)")
    if plan.megatron_fsdp or plan.torch_fsdp2:
        found.append("buffers of FSDP")
    if plan.cuda_graph_impl != "none":
        found.append("pools of CUDA graphs")
    if plan.cpu_offloading or plan.fine_grained_activation_offloading:
        found.append("offload of activations")
    if plan.optimizer_cpu_offload:
        found.append("offload of the optimizer")
    if plan.optimizer not in MOMENTS:
        found.append(f"states of the optimizer {plan.optimizer} (counted as Adam's)")
    if plan.mtp_num_layers:
        found.append("multi-token prediction layers")
    if plan.moe_dispatcher_backend or plan.args.get("moe-token-dispatcher-type") == "flex":
        found.append("buffers of the flex token dispatcher")
    if plan.nccl_ub:
        found.append("NCCL user buffers")
    if plan.lora is not None and (plan.num_experts or s.mla is not None):
        found.append("LoRA on experts and latent attention")
    if plan.lora is not None and set(lora.surfaces(s)) != {
        name.rsplit(".", 1)[-1] for name in plan.lora.target_modules
    }:
        found.append("LoRA on modules other than qkv, proj, fc1 and fc2")
    if set(plan.recompute_modules) - RECOMPUTE_MODULES:
        names = ", ".join(sorted(set(plan.recompute_modules) - RECOMPUTE_MODULES))
        found.append(f"recompute of {names}")
    if plan.is_bridge:
        found.append("settings of the Megatron-Bridge recipe that the job file does not repeat")
    grid = plan.dp is not None and (plan.edp is not None or not plan.num_experts)
    if not layers_known or not grid or plan.num_microbatches is None:
        found.append("a layout that Megatron refuses (see the findings)")
    return tuple(dict.fromkeys(found))


def _given(plan: Plan, name: str) -> bool:
    value = plan.args.get(name)
    return value is not None and value is not False


def assumptions(s: Sizes) -> tuple[str, ...]:
    """What was taken for granted because the job file does not say it."""
    plan = s.plan
    found = []
    if plan.gpu is None and s.on_gpu:
        found.append("library workspaces as on an H100: cluster.gpu names no known GPU")
    if plan.transformer_engine is None and s.te:
        found.append("a Transformer Engine of 2025 or newer: cluster.transformer_engine not given")
    if plan.torch is None and s.capability[0] >= 10:
        found.append("cuBLAS workspaces of torch 2.12 or newer: cluster.torch not given")
    if not (plan.bf16 or plan.fp16 or plan.fp8 or plan.fp4):
        found.append("bf16" if plan.is_bridge else "fp32 training: neither bf16 nor fp16 is given")
    if s.te and not s.unfused_attention and plan.attention_backend == "auto":
        found.append("flash or fused attention (attention-backend auto)")
    if plan.global_batch_size is None:
        found.append("one microbatch a step: no global-batch-size")
    if s.moe is not None:
        found.append("balanced routing: every expert gets the same number of tokens")
    if plan.lora is not None:
        found.append("LoRA: the base is frozen, the adapters train in the base's precision")
        if plan.sequence_parallel and s.te:
            found.append(
                "LoRA: Transformer Engine keeps its local norm output beside the gathered input "
                "of LoRA-A"
            )
    return tuple(found)
