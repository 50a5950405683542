"""Tensors that a layer keeps for its backward pass, per microbatch. Bytes on one rank.

Each function names every tensor; without mention otherwise a tensor has 2 bytes an element (4 in
fp32 training). U is one hidden tensor as stored between layers, e*h*T/t with sequence
parallelism, else e*h*T. Sources: the autograd functions of Transformer Engine (transformer_engine/
pytorch/module/layernorm_linear.py, linear.py, attention/) and of megatron/core/fusions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtlaunch.preflight.layers import Chunk
from mtlaunch.preflight.memory import lora
from mtlaunch.preflight.memory.sizes import Sizes, flag

Tensors = dict[str, int]

# The block's output statistics are fp32: one value a head and token for flash and fused attention.
STATISTIC_BYTES = 4


def attention(s: Sizes) -> Tensors:
    """Self attention of one layer.

    Norm input U and output U (both saved by the fused norm and linear), q, k, v e*T(nd + 2gd)/t
    (not expanded for GQA; the local spec expands), its output e*T*nd/t (the projection's input),
    softmax statistics 4*T*n/t, dropout mask of the hidden state U/e. QK norms keep their inputs,
    e*T(n+g)d/t. Unfused attention keeps the scores instead of the statistics, see `scores`.
    """
    if s.mla is not None:
        return latent_attention(s)
    e, t, tokens = s.element, s.tp, s.tokens
    output = e * tokens * s.query_width // t
    kv_width = s.kv_width if s.te else 2 * s.query_width
    kept: Tensors = {
        "norm_input": s.hidden_bytes,
        "norm_output": lora.norm_output(s, "linear_qkv"),
        "qkv": output + e * tokens * max(kv_width // t, 2 * s.d),
        "output": output,
        "dropout_mask": _mask(s),
    }
    if s.plan.qk_layernorm:
        kept["qk_norm_input"] = e * tokens * (s.n + s.g) * s.d // t
    if s.flash_attention_copies:
        kept["output_copy"] = output
    kept |= scores(s)
    kept |= lora.saved(s, ("linear_qkv", "linear_proj"))
    return kept


def latent_attention(s: Sizes) -> Tensors:
    """Multi-latent attention of one layer.

    As `attention`, with the down projections' outputs and their norms e*T_s(2q + kv+rope + 2kv),
    T_s the tokens of a sequence-parallel shard, expanded q and k of qk+rope a head and v.
    Source: megatron/core/transformer/multi_latent_attention.py.
    """
    mla = s.mla
    assert mla is not None
    e, t, tokens = s.element, s.tp, s.tokens
    output = e * tokens * s.n * mla.v // t
    down = 2 * (mla.q_rank or 0) + mla.kv_rank + mla.rope + 2 * mla.kv_rank
    expanded = e * tokens * s.n * (2 * (mla.qk + mla.rope) + mla.v) // t
    kept = {
        "norm_input": s.hidden_bytes,
        "norm_output": s.hidden_bytes,
        "latents": e * s.shard_tokens * down,
        "qkv": expanded,
        "output": output,
        "dropout_mask": _mask(s),
    } | scores(s)
    if "mla_up_proj" in s.plan.recompute_modules:
        kept["qkv"] = 0
    return kept


def scores(s: Sizes) -> Tensors:
    """What the softmax leaves: statistics 4*T*n/t, or the score matrix when unfused.

    Unfused: softmax output e*P, P = b*(n/t)*(s/c)*s, and with attention dropout its output e*P
    and mask P (megatron/core/transformer/dot_product_attention.py; Transformer Engine's
    UnfusedDotProductAttention). Recomputing core_attn drops all of it.
    """
    if not s.unfused_attention:
        return {"statistics": STATISTIC_BYTES * s.tokens * s.n // s.tp}
    if "core_attn" in s.plan.recompute_modules:
        return {}
    return {"scores": _scores(s)}


def _scores(s: Sizes) -> int:
    matrix = s.score_elements
    dropout = (s.element + 1) * matrix if s.plan.attention_dropout > 0 else 0
    return s.element * matrix + dropout


def _mask(s: Sizes) -> int:
    """Hidden dropout's mask, one byte an element; p = 0 keeps nothing."""
    return s.hidden_bytes // s.element if s.plan.hidden_dropout > 0 else 0


def mlp(s: Sizes) -> Tensors:
    """Dense MLP of one layer.

    Norm input and output 2U, fc1's output e*T*m*f/t (kept by the activation), the activation's
    output e*T*f/t (kept by fc2), dropout mask U/e. The same for GELU, fused SwiGLU and squared
    ReLU; SwiGLU without fusion keeps one more f-wide tensor (megatron/core/transformer/mlp.py).
    """
    kept = {
        "norm_input": s.hidden_bytes,
        "norm_output": lora.norm_output(s, "linear_fc1"),
        "dropout_mask": _mask(s),
    } | _inner(s, s.f)
    if not lora.keeps_input(s, "linear_fc2"):
        kept["activation_output"] = 0
    kept |= lora.saved(s, ("linear_fc1", "linear_fc2"))
    if "mlp" in s.plan.recompute_modules:
        # the whole MLP is one checkpoint; Transformer Engine's norm is inside it
        for name in set(kept) - {"norm_input", "dropout_mask", "" if s.te else "norm_output"}:
            kept[name] = 0
    return kept


def _inner(s: Sizes, ffn: int) -> Tensors:
    e, tokens = s.element, s.tokens
    inner = {
        "fc1_output": e * tokens * s.gate * ffn // s.tp,
        "activation_output": e * tokens * ffn // s.tp,
    }
    if s.plan.swiglu and flag(s.plan, "no-bias-swiglu-fusion"):
        inner["gate_output"] = e * tokens * ffn // s.tp
    return inner


def moe(s: Sizes) -> Tensors:
    """MoE block of one layer, on balanced routing.

    2U for the norm; permuted tokens w, fc1's output m*f, the activation's output f, and again f
    where the router probability is a step of its own, each e*P, P = T_s*k*t_e rows on this rank;
    the router's scores, probabilities and map 14*T_s*E; the shared expert as a dense MLP.
    Source: megatron/core/transformer/moe/experts.py, router.py, token_dispatcher.py.
    """
    m = s.moe
    assert m is not None
    e, plan = s.element, s.plan
    rows = s.shard_tokens * m.top_k * (plan.etp if plan.sequence_parallel else 1)
    ffn = m.ffn // plan.etp
    kept = {
        "norm_input": s.hidden_bytes,
        "norm_output": s.hidden_bytes,
        "dropout_mask": _mask(s),
        "router": ROUTER_BYTES * s.shard_tokens * m.experts,
        "permuted_tokens": e * rows * m.latent,
        "expert_fc1_output": e * rows * s.gate * ffn,
        "expert_activation_output": e * rows * ffn * (1 if m.fused_weighting else 2),
    }
    if m.shared_ffn:
        kept |= {f"shared_{name}": size for name, size in _inner(s, m.shared_ffn).items()}
    if "moe_act" in plan.recompute_modules:
        kept["expert_activation_output"] -= e * rows * ffn
    if "layernorm" in plan.recompute_modules:
        kept["norm_output"] = 0
    if "shared_experts" in plan.recompute_modules:
        for name in [name for name in kept if name.startswith("shared_")]:
            kept[name] = 0
    if "moe" in plan.recompute_modules:
        for name in set(kept) - {"norm_input", "norm_output", "dropout_mask"}:
            kept[name] = 0
    return kept


# scores and probabilities in fp32, the routing map and its permutations
ROUTER_BYTES = 14


@dataclass(frozen=True, slots=True)
class Activations:
    """Of one layer or chunk and microbatch, by component; `recomputed` comes back in backward."""

    kept: dict[str, int]
    recomputed: int = 0

    @property
    def total(self) -> int:
        return sum(self.kept.values())


def layer(s: Sizes, routed: bool) -> Activations:
    """One layer's activations by component, and what its selective recompute brings back."""
    attention_kept = attention(s)
    block = moe(s) if routed else mlp(s)
    parts = {
        "attention_scores": attention_kept.pop("scores", 0),
        "lora_inputs": attention_kept.pop("lora", 0) + block.pop("lora", 0),
        "attention_activations": sum(attention_kept.values()),
        "moe_activations" if routed else "mlp_activations": sum(block.values()),
    }
    if s.mla is not None and "layernorm" in s.plan.recompute_modules:
        parts["attention_activations"] -= s.hidden_bytes  # MLA's norm is a module of its own
    kept = {name: size for name, size in parts.items() if size}
    return Activations(kept, _brought_back(s, routed))


def _brought_back(s: Sizes, routed: bool) -> int:
    """Bytes of the largest checkpoint of one layer, alive while it is recomputed."""
    modules, sizes = s.plan.recompute_modules, [0]
    if "core_attn" in modules and s.unfused_attention:
        sizes.append(_scores(s))
    if "mlp" in modules and not routed:
        sizes.append(sum(_inner(s, s.f).values()) + s.hidden_bytes)
    return max(sizes)


def chunk(s: Sizes, one: Chunk, layers: Sequence[Activations]) -> Activations:
    """Activations of one microbatch in one chunk of these layers.

    Full recompute keeps each checkpoint's input, U, instead, and brings one checkpoint's layers
    back during backward: `uniform` makes a checkpoint of every k layers, `block` checkpoints the
    first k layers of the chunk one by one (megatron/core/transformer/transformer_block.py
    _checkpointed_forward).
    """
    plan = s.plan
    kept: dict[str, int] = {}
    brought_back = 0
    if one.embedding and plan.hidden_dropout > 0:
        kept["embedding_dropout_mask"] = _mask(s)
    full = plan.recompute_granularity == "full"
    each = max(1, plan.recompute_num_layers or 1)
    block = plan.recompute_method == "block"
    checkpointed = (min(each, len(layers)) if block else len(layers)) if full else 0
    if checkpointed:
        span = 1 if block else each
        divided = s.tp if flag(plan, "distribute-saved-activations") else 1
        kept["recompute_inputs"] = -(-checkpointed // span) * s.hidden_bytes // divided
        largest = max(one.total for one in layers[:checkpointed])
        brought_back = largest * min(span, checkpointed)
    for layer_activations in layers[checkpointed:]:
        for name, size in layer_activations.kept.items():
            kept[name] = kept.get(name, 0) + size
        brought_back = max(brought_back, layer_activations.recomputed)
    return Activations(kept, brought_back)
