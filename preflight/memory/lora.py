"""LoRA: a frozen base, adapters that train, and what their inputs keep in memory.

The adapters are Megatron-Bridge's (src/megatron/bridge/peft/utils.py ParallelLinearAdapter): on a
column-parallel layer A is [r/t, h] and B [out/t, r], on a row-parallel one A is [r, in/t] and B
[h/t, r]; so every adapter has r*(in + out)/t parameters on a rank. Bytes are per layer and
microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable

from mtlaunch.preflight.lora import COLUMN_SURFACES, SequenceParallelFacts, decide
from mtlaunch.preflight.memory.sizes import Sizes


def widths(s: Sizes, surface: str) -> tuple[int, int]:
    """Input and output width of a linear layer, whole, in elements; (0, 0) when not a known one."""
    return {
        "linear_qkv": (s.h, s.query_width + s.kv_width),
        "linear_proj": (s.query_width, s.h),
        "linear_fc1": (s.h, s.gate * s.f),
        "linear_fc2": (s.f, s.h),
    }.get(surface, (0, 0))


def surfaces(s: Sizes) -> tuple[str, ...]:
    """The target modules that this formula knows, by the last part of their names."""
    if s.plan.lora is None:
        return ()
    names = (name.rsplit(".", 1)[-1] for name in s.plan.lora.target_modules)
    return tuple(dict.fromkeys(name for name in names if widths(s, name)[0]))


def parameters(s: Sizes, layers: int) -> int:
    """Adapter parameters on a rank: r*(in + out)/t for each surface and layer."""
    if s.plan.lora is None:
        return 0
    rank = s.plan.lora.dim
    return layers * sum(rank * sum(widths(s, one)) // s.tp for one in surfaces(s))


def variant(s: Sizes, surface: str) -> str:
    """base, regather or gather-free, as the rank will decide it."""
    plan = s.plan
    assert plan.lora is not None
    facts = SequenceParallelFacts(
        variant=plan.lora.sequence_parallel,
        tp=plan.tp,
        sequence_parallel=plan.sequence_parallel,
        cuda_graphs=plan.cuda_graph_impl != "none",
        cpu_offload_activations=plan.cpu_offloading,
        recompute_granularity=plan.recompute_granularity,
        recompute_modules=plan.recompute_modules,
    )
    return decide(surface, facts).uses


def norm_output(s: Sizes, surface: str) -> int:
    """The normalised hidden state before `surface` that the base or the adapter keeps, U or 0.

    Transformer Engine saves it whether or not the weight trains (layernorm_linear.py ln_out). The
    local spec's frozen linear does not (megatron/core/tensor_parallel/layers.py
    LinearWithFrozenWeight); then it is kept only as the adapter's own local input.
    """
    if s.plan.lora is None or s.te:
        return s.hidden_bytes
    if surface not in surfaces(s):
        return 0
    return 0 if gathers_input(s, surface) else s.hidden_bytes


def keeps_input(s: Sizes, surface: str) -> bool:
    """Whether a linear layer's input is kept: a frozen weight needs it only for its adapter."""
    return s.plan.lora is None or surface in surfaces(s)


def gathers_input(s: Sizes, surface: str) -> bool:
    """Whether LoRA-A keeps a gathered input: a column layer's, with sequence parallelism."""
    if surface not in COLUMN_SURFACES or not (s.plan.sequence_parallel and s.tp > 1):
        return False
    return variant(s, surface) == "base"


def saved(s: Sizes, wanted: Iterable[str]) -> dict[str, int]:
    """What the adapters of some surfaces add to the base's activations, as one tensor "lora".

    Each: its bottleneck R = e*T*r. The gathered input of a column layer e*T*h, unless regather or
    gather-free leave the local one, which the base keeps anyway; gather-free keeps its gathered
    weight e*r*h. LoRA dropout keeps a dropped copy of the input and a one-byte mask, in place of
    the gathered input.
    """
    plan = s.plan
    if plan.lora is None:
        return {}
    e, rank, total = s.element, plan.lora.dim, 0
    for surface in surfaces(s):
        if surface not in wanted:
            continue
        total += e * s.tokens * rank
        column = surface in COLUMN_SURFACES
        if column and gathers_input(s, surface):
            elements = s.tokens * s.h
            total += e * elements
        else:
            elements = s.shard_tokens * s.h if column else s.tokens * widths(s, surface)[0] // s.tp
            if plan.lora.dropout > 0:
                total += e * elements
        if plan.lora.dropout > 0:
            total += elements
        if column and plan.sequence_parallel and variant(s, surface) == "gather-free":
            total += e * rank * s.h
    return {"lora": total}


def regather_buffers(s: Sizes) -> int:
    """What regather holds beside: Megatron's gather buffer e*T*h and a reduce-scattered U.

    LinearWithGradAccumulationAndAsyncCommunication.backward gathers the input again into the
    global memory buffer, which stays, and reduce-scatters its gradient into a new local tensor
    (megatron/core/tensor_parallel/layers.py).
    """
    if not any(variant(s, one) == "regather" for one in surfaces(s)):
        return 0
    return s.gathered_hidden_bytes + s.hidden_bytes


def saving(s: Sizes, layers: int) -> int:
    """Bytes that regather or gather-free save over base on a rank that holds `layers` layers.

    N column surfaces of S = e*T*h each. Transformer Engine: N*S, since the base keeps its local
    norm output beside the gathered one; regather gives back one gather buffer S and one shard
    S/t: S(N - 1 - 1/t). Local spec: N*S(1 - 1/t). gather-free keeps N gathered weights e*r*h.
    """
    if s.plan.lora is None:
        return 0
    total = 0
    for surface in surfaces(s):
        used = variant(s, surface) if surface in COLUMN_SURFACES else "base"
        if used == "base":
            continue
        total += layers * (s.gathered_hidden_bytes - (0 if s.te else s.hidden_bytes))
        if used == "gather-free":
            total -= layers * s.element * s.plan.lora.dim * s.h
    return total - regather_buffers(s) if s.te else total
