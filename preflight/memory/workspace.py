"""Buffers that libraries and Megatron keep between steps, through PyTorch's allocator. Bytes."""

from __future__ import annotations

from collections.abc import Iterable

from mtlaunch.preflight.layers import Chunk
from mtlaunch.preflight.memory.sizes import Sizes, cublas_setting

KIB = 2**10
MIB = 2**20

# PyTorch's cuBLAS workspace without CUBLAS_WORKSPACE_CONFIG, ":4096:2:16:8" and ":4096:8" in
# KiB (aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize)
CUBLAS_BYTES = (4096 * 2 + 16 * 8) * KIB
CUBLAS_HOPPER_BYTES = 4096 * 8 * KIB
# Blackwell got Hopper's size later (same function): runs up to torch 2.11 have the small one
CUBLAS_BLACKWELL_FROM = (2, 12)

# The main thread and the autograd thread each own a handle.
CUBLAS_HANDLES = 2

# Transformer Engine: 32 MiB from compute capability 9 on, else 4 (transformer_engine/pytorch/
# module/base.py get_cublas_workspace_size_bytes), and one per extra stream for grouped GEMM
# (get_multi_stream_cublas_workspace).
TE_HOPPER_BYTES = 32 * MIB
TE_BYTES = 4 * MIB
TE_STREAMS = 4

# Placeholder gradients (get_dummy_wgrad) are absent from runs with Transformer Engine up to 2.5
# and present from 2.7 on.
DUMMY_GRADIENTS_FROM = (2, 6)


def cublas(s: Sizes) -> int:
    """PyTorch's cuBLAS workspaces, one for each of two handles.

    8.125 MiB each before Hopper, 32 MiB on Hopper and, with newer torch, Blackwell; what
    CUBLAS_WORKSPACE_CONFIG says wins.
    """
    if not s.on_gpu:
        return 0
    setting = cublas_setting(s.plan)
    return CUBLAS_HANDLES * (_configured(setting) if setting else _default_cublas(s))


def _default_cublas(s: Sizes) -> int:
    major = s.capability[0]
    if major == 9:
        return CUBLAS_HOPPER_BYTES
    if major >= 10 and (s.plan.torch is None or s.plan.torch >= CUBLAS_BLACKWELL_FROM):
        return CUBLAS_HOPPER_BYTES
    return CUBLAS_BYTES


def _configured(setting: str) -> int:
    """Bytes of a setting: pairs of size in KiB and count.

    >>> _configured(":4096:8") // MIB, _configured(":16:8") // KIB
    (32, 128)
    """
    numbers = [int(part) for part in setting.split(":") if part.strip().isdigit()]
    pairs = zip(numbers[::2], numbers[1::2], strict=False)
    return sum(size * count * KIB for size, count in pairs)


def te_gemm(s: Sizes) -> int:
    """Transformer Engine's own GEMM workspace, and four more for grouped GEMM."""
    if not (s.te and s.on_gpu):
        return 0
    one = TE_HOPPER_BYTES if s.capability[0] >= 9 else TE_BYTES
    grouped = s.moe is not None and s.moe.grouped_gemm
    return one * (1 + (TE_STREAMS if grouped else 0))


def global_memory_buffer(s: Sizes, chunks: Iterable[Chunk]) -> int:
    """Megatron's "mpu" buffer, which only grows (megatron/core/utils.py GlobalMemoryBuffer).

    The sequence-parallel output layer gathers its input into it, e*T*h; so does the wgrad of
    every sequence-parallel layer of the local spec. The local attention computes its scores in
    it, e*b*(n/t)*s^2. The same memory serves them all: the largest counts.
    """
    wanted = 0
    if s.plan.sequence_parallel and s.plan.lora is None:
        if not s.te or any(one.loss for one in chunks):
            wanted = s.gathered_hidden_bytes
    if not s.te:
        wanted = max(wanted, s.element * s.score_elements)
    return wanted


def dummy_weight_gradients(s: Sizes, chunks: Iterable[Chunk], kinds: Iterable[bool]) -> int:
    """Placeholder gradients of fused weight-gradient accumulation, 2 bytes an element.

    With gradient accumulation fusion Transformer Engine adds a weight's gradient into Megatron's
    buffer and hands autograd a placeholder, one cached tensor per distinct weight shape
    (transformer_engine/pytorch/module/base.py get_dummy_wgrad; Megatron's output layer uses it
    too, megatron/core/tensor_parallel/layers.py). `kinds`: whether dense and MoE layers are on
    the rank. [rows, columns] and [columns, rows] are two shapes.
    """
    plan = s.plan
    if not (s.te and plan.gradient_accumulation_fusion) or plan.lora is not None:
        return 0
    te = plan.transformer_engine
    if te is not None and te < DUMMY_GRADIENTS_FROM:
        return 0
    shapes: set[tuple[int, int]] = set()
    for routed in kinds:
        shapes |= _attention_shapes(s)
        shapes |= _expert_shapes(s) if routed else _mlp_shapes(s, s.f)
    if any(one.loss for one in chunks):
        shapes.add((s.vocab // s.tp, s.h))
    return s.element * sum(rows * columns for rows, columns in shapes)


def _attention_shapes(s: Sizes) -> set[tuple[int, int]]:
    if s.mla is None:
        return {
            ((s.query_width + s.kv_width) // s.tp, s.h),
            (s.h, s.query_width // s.tp),
        }
    m, heads = s.mla, s.n // s.tp
    queries = (
        {(heads * (m.qk + m.rope), s.h)}
        if m.q_rank is None
        else {(m.q_rank, s.h), (heads * (m.qk + m.rope), m.q_rank)}
    )
    return queries | {
        (m.kv_rank + m.rope, s.h),
        (heads * (m.qk + m.v), m.kv_rank),
        (s.h, heads * m.v),
    }


def _mlp_shapes(s: Sizes, ffn: int) -> set[tuple[int, int]]:
    return {(s.gate * ffn // s.tp, s.h), (s.h, ffn // s.tp)}


def _expert_shapes(s: Sizes) -> set[tuple[int, int]]:
    assert s.moe is not None
    ffn = s.moe.ffn // s.plan.etp
    shapes = {(s.gate * ffn, s.moe.latent), (s.moe.latent, ffn)}
    if s.moe.shared_ffn:
        shapes |= _mlp_shapes(s, s.moe.shared_ffn)
    return shapes


def stage_input(s: Sizes, chunks: Iterable[Chunk]) -> int:
    """The last activation received from the previous stage and its gradient, kept between steps.

    2U for each chunk that is not the model's first: TransformerBlock.set_input_tensor keeps the
    tensor, schedules.py calls retain_grad on it, and neither is cleared. At the peak it is one of
    the activations and not counted again.
    """
    if s.plan.pp == 1:
        return 0
    return 2 * s.hidden_bytes * sum(not one.embedding for one in chunks)
