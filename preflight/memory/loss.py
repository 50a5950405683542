"""What the last stage holds at the moment of the loss. Bytes on one rank."""

from __future__ import annotations

from mtlaunch.preflight.memory.sizes import Sizes, number


def logits(s: Sizes) -> int:
    """B: the output layer's product, e*T*V/t."""
    return s.element * s.tokens * s.vocab // s.tp


def cross_entropy(s: Sizes) -> int:
    """What the cross entropy makes of the logits, beside them.

    Unfused: the fp32 copy 4*T*V/t, everything after in place: 6 bytes a logit in all
    (megatron/core/tensor_parallel/cross_entropy.py; the backward pass, fp32 softmax and bf16
    gradient, is as large). --cross-entropy-loss-fusion, native: the compiled function cannot work
    in place, 10 in all (megatron/core/fusions/fused_cross_entropy.py); te: in place on the bf16
    logits, 2 in all (transformer_engine/pytorch/cross_entropy.py). In fp32 training `.float()`
    copies nothing.
    """
    plan = s.plan
    fp32 = 4 * s.tokens * s.vocab // s.tp
    if plan.cross_entropy_fusion:
        if plan.cross_entropy_impl == "te":
            return 0
        return 2 * fp32 if s.element == 2 else fp32
    return fp32 if s.element == 2 else 0


def deferred_gradients(s: Sizes) -> int:
    """Logit gradients kept by --defer-embedding-wgrad-compute, B for each deferred microbatch.

    --wgrad-deferral-limit 0 is no limit (tensor_parallel/layers.py
    LinearWithGradAccumulationAndAsyncCommunication.backward).
    """
    plan = s.plan
    if not plan.args.get("defer-embedding-wgrad-compute") or plan.pp == 1:
        return 0
    limit = number(plan, "wgrad-deferral-limit")
    count = min(limit, s.microbatches) if limit else s.microbatches
    return count * logits(s)


def final_norm(s: Sizes) -> int:
    """Input and output of the final norm, 2U."""
    return 2 * s.hidden_bytes


def tail(s: Sizes) -> dict[str, int]:
    """The loss tail by component: final norm, logits, cross entropy."""
    return {
        "final_norm": final_norm(s),
        "logits": logits(s),
        "cross_entropy": cross_entropy(s),
        "deferred_logit_gradients": deferred_gradients(s),
    }
