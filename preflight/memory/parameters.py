"""Parameters on one rank, counted as megatron-core builds them.

Every function returns a number of parameters (not bytes) of one tensor-parallel rank. Sources are
modules of megatron/core, 0.16.1; the counts are compared with built models in
tests/preflight/memory/test_parameters.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mtlaunch.preflight.layers import Chunk
from mtlaunch.preflight.memory.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Counts:
    """Dense parameters are sharded over DP*CP, those of routed experts over expert DP."""

    dense: int = 0
    expert: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.dense + other.dense, self.expert + other.expert)

    @property
    def total(self) -> int:
        return self.dense + self.expert


def attention(s: Sizes) -> int:
    """Self attention with its norm: LN + h(nd + 2gd)/t + nd*h/t, biases, QK norms.

    Source: transformer/attention.py SelfAttention. The query/key norms are one head wide and
    replicated; the output bias is replicated.
    """
    if s.mla is not None:
        return latent_attention(s)
    plan = s.plan
    qkv = s.query_width + s.kv_width
    count = s.norm + s.h * qkv // s.tp + s.query_width * s.h // s.tp
    if plan.bias_linear or plan.qkv_bias:
        count += qkv // s.tp
    if plan.bias_linear:
        count += s.h
    if plan.qk_layernorm:
        count += 2 * s.d * s.norm // s.h
    return count


def latent_attention(s: Sizes) -> int:
    """Multi-latent attention with its norm; the down projections are replicated over TP.

    LN + h*q + q*n(qk+rope)/t (or h*n(qk+rope)/t) + h(kv+rope) + kv*n(qk+v)/t + n*v*h/t, norms
    over q and kv with QK layernorm. Source: transformer/multi_latent_attention.py
    MLASelfAttention.
    """
    mla = s.mla
    assert mla is not None
    heads = s.n * (mla.qk + mla.rope)
    if mla.q_rank is None:
        queries = s.h * heads // s.tp
    else:
        queries = s.h * mla.q_rank + mla.q_rank * heads // s.tp
    keys = s.h * (mla.kv_rank + mla.rope) + mla.kv_rank * s.n * (mla.qk + mla.v) // s.tp
    count = s.norm + queries + keys + s.n * mla.v * s.h // s.tp
    if s.plan.bias_linear:
        count += s.h
    if s.plan.qk_layernorm:
        count += (mla.kv_rank + (mla.q_rank or 0)) * s.norm // s.h
    return count


def mlp(s: Sizes) -> int:
    """Dense MLP with its norm: LN + (m+1)hf/t, biases m*f/t + h; m = 2 when gated.

    Source: transformer/mlp.py MLP.
    """
    return s.norm + _mlp_weights(s, s.f)


def _mlp_weights(s: Sizes, ffn: int) -> int:
    count = (s.gate + 1) * s.h * ffn // s.tp
    if s.plan.bias_linear:
        count += s.gate * ffn // s.tp + s.h
    return count


def moe(s: Sizes) -> Counts:
    """MoE block with its norm: LN + router E*h + shared expert + latent projections; E/e experts.

    An expert is (m+1)*w*f/t_e, w the latent width or h; biases m*f/t_e + w. The router and the
    latent projections are replicated. Source: transformer/moe/moe_layer.py, router.py, experts.py,
    shared_experts.py.
    """
    assert s.moe is not None
    plan, m = s.plan, s.moe
    dense = s.norm + m.experts * s.h
    if m.shared_ffn:
        dense += _mlp_weights(s, m.shared_ffn) + (s.h if m.shared_gate else 0)
    if m.latent != s.h:
        dense += 2 * s.h * m.latent
    one = (s.gate + 1) * m.latent * m.ffn // plan.etp
    if plan.bias_linear:
        one += s.gate * m.ffn // plan.etp + m.latent
    return Counts(dense, m.experts // plan.ep * one)


def layer(s: Sizes, routed: bool) -> Counts:
    """One transformer layer, dense or with experts."""
    block = moe(s) if routed else Counts(mlp(s))
    return Counts(attention(s)) + block


def word_embedding(s: Sizes) -> int:
    """V*h/t, of the input embedding, of the output layer, and of a tied copy alike.

    Source: tensor_parallel/layers.py VocabParallelEmbedding, ColumnParallelLinear.
    """
    return s.vocab * s.h // s.tp


def position_embedding(s: Sizes) -> int:
    """Learned positions, max_position_embeddings * h, replicated over TP.

    Source: models/common/embeddings/language_model_embedding.py.
    """
    plan = s.plan
    if not plan.learned_positions:
        return 0
    return (plan.max_position_embeddings or plan.seq_length or 0) * s.h


def chunk(s: Sizes, one: Chunk, layers: Iterable[Counts]) -> Counts:
    """One model chunk: its layers, the embedding on the first, final norm and output on the last.

    A tied output layer has no weight of its own where the embedding is in the same chunk, and a
    copy elsewhere (models/gpt/gpt_model.py, common/language_module/language_module.py
    setup_embeddings_and_output_layer).
    """
    layers = tuple(layers)
    dense = sum(counts.dense for counts in layers)
    expert = sum(counts.expert for counts in layers)
    if one.embedding:
        dense += word_embedding(s) + position_embedding(s)
    if one.loss:
        dense += s.norm
        if s.plan.untied_embeddings or not one.embedding:
            dense += word_embedding(s)
    return Counts(dense, expert)
