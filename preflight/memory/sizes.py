"""The quantities that the formulas share, worked out once from a Plan.

Letters follow Megatron's own papers: s sequence, b micro-batch, h hidden, t tensor parallel, c
context parallel, n heads, g key/value groups, d head width, f FFN width, V padded vocabulary. A
"token" below is one position of one sample of one microbatch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from mtlaunch.preflight.environment import own_setting
from mtlaunch.preflight.gpus import GPUS
from mtlaunch.preflight.plan import Plan

# Transformer Engine saves no score matrix from compute capability 8.0 on, in 16 bits only
# (transformer_engine/pytorch/attention, get_attention_backend).
FUSED_ATTENTION_FROM = (8, 0)

# Whose workspaces count when the job file names no GPU.
DEFAULT_GPU = "H100-80GB"

# Transformer Engine 1.2 ran deterministic attention (NVTE_ALLOW_NONDETERMINISTIC_ALGO=0) unfused,
# 1.11 and newer do not; deterministic FlashAttention needs flash-attn 2.4.1, which 1.6 took up.
DETERMINISTIC_FLASH_FROM = (1, 6)


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture of experts; widths in elements, `expert_layers` one bool a layer."""

    experts: int
    top_k: int
    ffn: int
    shared_ffn: int
    latent: int  # width of the routed tokens: moe_latent_size, else h
    shared_gate: bool
    grouped_gemm: bool
    fused_weighting: bool  # router probability applied inside the activation kernel
    expert_layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-latent attention; ranks and widths in elements."""

    q_rank: int | None
    kv_rank: int
    qk: int
    rope: int
    v: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one rank. `element` is bytes of a parameter and of an activation."""

    plan: Plan
    element: int
    h: int
    n: int
    g: int
    d: int
    f: int
    vocab: int
    gate: int  # fc1 outputs per FFN unit: 2 with a gated activation
    norm: int  # parameters of one norm of width h
    tokens: int  # s*b/c, whole on a rank outside the sequence-parallel regions
    shard_tokens: int  # tokens/t with sequence parallelism
    tp: int
    dp: int
    edp: int
    microbatches: int
    capability: tuple[int, int]
    on_gpu: bool
    te: bool
    mla: Mla | None
    moe: Moe | None

    @property
    def hidden_bytes(self) -> int:
        """U: one hidden tensor [s/c(/t), b, h] as stored between layers."""
        return self.element * self.h * self.shard_tokens

    @property
    def gathered_hidden_bytes(self) -> int:
        """One hidden tensor of all tokens, [s/c, b, h]."""
        return self.element * self.h * self.tokens

    @property
    def query_width(self) -> int:
        return self.n * self.d

    @property
    def kv_width(self) -> int:
        """Keys and values together."""
        return 2 * self.g * self.d

    @property
    def score_elements(self) -> int:
        """One attention score matrix, b * n/t * s/c * s."""
        s, b = self.plan.seq_length or 0, self.plan.micro_batch_size or 0
        return b * self.n * (s // self.plan.cp) * s // self.tp

    @property
    def unfused_attention(self) -> bool:
        """Whether attention keeps the score matrix.

        The local spec's DotProductAttention always does (megatron/core/transformer/
        dot_product_attention.py). Transformer Engine does when told to, in fp32, before
        compute capability 8.0, and in deterministic mode before FlashAttention could do that.
        """
        plan = self.plan
        if not self.te or plan.attention_backend in ("unfused", "local"):
            return True
        if self.element == 4 or self.capability < FUSED_ATTENTION_FROM:
            return True
        te = plan.transformer_engine
        return te is not None and te < DETERMINISTIC_FLASH_FROM and deterministic_attention(plan)

    @property
    def flash_attention_copies(self) -> bool:
        """Whether FlashAttention's [b, s] layout costs a copy of the output.

        Megatron keeps [s, b]; with b > 1 the transpose is a real copy. Transformer Engine
        prefers FlashAttention on compute capability 8, and on 10 in deterministic mode; on 9 it
        takes cuDNN, which reads [s, b] (transformer_engine/pytorch/attention).
        """
        plan = self.plan
        if self.unfused_attention or (plan.micro_batch_size or 0) < 2 or plan.cp > 1:
            return False
        if plan.attention_backend == "fused":
            return False
        major = self.capability[0]
        return major == 8 or (major >= 10 and deterministic_attention(plan))


def deterministic_attention(plan: Plan) -> bool:
    """Whether Transformer Engine is held to deterministic attention."""
    own = own_setting(plan, "NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    return own[0] == "0" if own is not None else plan.deterministic_mode


def number(plan: Plan, flag: str, default: int = 0) -> int:
    """A whole number among the options without a field of their own."""
    value: Any = plan.args.get(flag, default)
    try:
        return int(value)
    except (TypeError, ValueError):
        return default


def flag(plan: Plan, name: str) -> bool:
    return plan.args.get(name) in (True, 1, "true", "True")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def sizes_of(plan: Plan) -> Sizes | None:
    """The sizes of a plan, None when the model's shape is not known."""
    if not plan.shape_known:
        return None
    h, n = plan.hidden_size, plan.num_attention_heads
    assert h is not None and n is not None and plan.num_layers is not None
    assert plan.seq_length is not None and plan.micro_batch_size is not None
    assert plan.padded_vocab_size is not None
    tokens = plan.seq_length * plan.micro_batch_size // plan.cp
    dp = plan.dp or max(1, plan.world_size // plan.model_parallel_size)
    edp = plan.edp or max(1, plan.world_size // (plan.etp * plan.ep * plan.pp))
    batch = plan.global_batch_size or plan.micro_batch_size * dp
    gpu = plan.gpu or GPUS[DEFAULT_GPU]
    half = plan.bf16 or plan.fp16 or plan.fp8 or plan.fp4 or plan.is_bridge
    gated = plan.swiglu or flag(plan, "quick-geglu")
    ffn = plan.ffn_hidden_size or 4 * h
    return Sizes(
        plan=plan,
        element=2 if half else 4,
        h=h,
        n=n,
        g=plan.num_query_groups or n,
        d=plan.kv_channels or h // n,
        f=ffn,
        vocab=plan.padded_vocab_size,
        gate=2 if gated else 1,
        norm=h if plan.normalization == "RMSNorm" else 2 * h,
        tokens=tokens,
        shard_tokens=ceil_div(tokens, plan.tp) if plan.sequence_parallel else tokens,
        tp=plan.tp,
        dp=dp,
        edp=edp,
        microbatches=max(1, ceil_div(batch, max(1, plan.micro_batch_size * dp))),
        capability=gpu.compute_capability,
        on_gpu=plan.gpus_per_node is not None or plan.gpu_name is not None,
        te=plan.transformer_impl != "local",
        mla=_mla(plan),
        moe=_moe(plan, ffn, gated),
    )


def _mla(plan: Plan) -> Mla | None:
    """Defaults: megatron/training/arguments.py _add_mla_args."""
    if not flag(plan, "multi-latent-attention"):
        return None
    return Mla(
        q_rank=number(plan, "q-lora-rank") or None,
        kv_rank=number(plan, "kv-lora-rank", 32),
        qk=number(plan, "qk-head-dim", 128),
        rope=number(plan, "qk-pos-emb-head-dim", 64),
        v=number(plan, "v-head-dim", 128),
    )


def _moe(plan: Plan, ffn: int, gated: bool) -> Moe | None:
    if not plan.num_experts:
        return None
    assert plan.num_layers is not None and plan.hidden_size is not None
    squared_relu = flag(plan, "use-fused-weighted-squared-relu")
    swiglu = plan.swiglu and not plan.bias_linear and not flag(plan, "no-bias-swiglu-fusion")
    return Moe(
        experts=plan.num_experts,
        top_k=number(plan, "moe-router-topk", 2),
        ffn=number(plan, "moe-ffn-hidden-size") or ffn,
        shared_ffn=number(plan, "moe-shared-expert-intermediate-size"),
        latent=number(plan, "moe-latent-size") or plan.hidden_size,
        shared_gate=flag(plan, "moe-shared-expert-gate"),
        grouped_gemm=flag(plan, "moe-grouped-gemm"),
        fused_weighting=(swiglu or squared_relu) if gated or squared_relu else False,
        expert_layers=expert_layers(plan.args.get("moe-layer-freq", 1), plan.num_layers),
    )


def expert_layers(frequency: Any, num_layers: int) -> tuple[bool, ...]:
    """Which layers are MoE layers: every k-th from the first, or a list of 0 and 1.

    The list may be text, "[0]*3+[1]*58" or "([0,1]*2)", as megatron/training/arguments.py
    moe_freq_type takes it; only sums and products of such lists are read here.

    >>> expert_layers(2, 4), expert_layers("[0]*2+[1]", 3)
    ((True, False, True, False), (False, False, True))
    """
    if isinstance(frequency, str):
        frequency = _pattern(frequency)
    if isinstance(frequency, (list, tuple)):
        pattern = tuple(bool(one) for one in frequency)
        return (pattern + (True,) * num_layers)[:num_layers]
    step = frequency if isinstance(frequency, int) and frequency > 0 else 1
    return tuple(layer % step == 0 for layer in range(num_layers))


@functools.lru_cache(maxsize=64)
def _pattern(text: str) -> int | tuple[int, ...]:
    """A moe-layer-freq text without eval: numbers, lists, + and *."""
    import ast

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.List):
            return [value(item) for item in node.elts]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return value(node.left) + value(node.right)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return value(node.left) * value(node.right)
        raise ValueError(text)

    try:
        result = value(ast.parse(text, mode="eval").body)
    except (ValueError, SyntaxError, TypeError):
        return 1
    return result if isinstance(result, int) else tuple(result)


def cublas_setting(plan: Plan) -> str | None:
    """CUBLAS_WORKSPACE_CONFIG of the ranks: the user's own, or the block's in deterministic mode.

    Source: environment.policy_block.
    """
    own = own_setting(plan, "CUBLAS_WORKSPACE_CONFIG")
    if own is not None:
        return own[0]
    return ":4096:8" if plan.deterministic_mode else None
