"""LoRA under sequence parallelism: the autograd functions, over any process group.

Shapes, with t = size of the tensor-parallel group, s the whole sequence, b the batch:

    x_p  [s/t, b, h]   sequence-local input of a column-parallel layer
    A_p  [r/t, h]      LoRA-A of a column-parallel layer, sharded by rank r
    B_p  [out/t, r]    LoRA-B, sharded by output
    A_p  [r, in/t]     LoRA-A of a row-parallel layer, sharded by input

Three ways to compute a column-parallel layer's  Y_p = (X A^T) B_p^T,  X = all-gather of x_p:

    base         column_linear(x_p, A_p, sequence_parallel=True, keep_gathered=True)
                 keeps X, a whole [s, b, h], for the weight gradient  dA_p = dz_p^T X.
    regather     the same with keep_gathered=False: keeps x_p and gathers X again in backward.
                 Equal to base bit for bit: the same GEMMs on the same values.
    gather-free  gathered_weight_linear(x_p, A_p): gathers A instead, [r, h], so that no h-wide
                 tensor moves. z = x_p A^T is [s/t, b, r]; dA = dz^T x_p is a partial sum over the
                 sequence shards and is reduce-scattered, in fp32.

The weight gradient is added to `weight.main_grad` when there is one, in its own dtype, and
`grad_added_to_main_grad` is set, as Megatron's DistributedDataParallel expects; otherwise it is
returned. Source of the conventions: megatron-core 0.16.1 tensor_parallel/layers.py:443-625,
LinearWithGradAccumulationAndAsyncCommunication.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# --- collectives ---------------------------------------------------------------------------------
#
# A group of one is legal everywhere and moves nothing.

# torch 2.13 renamed both and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _gather_first(x: Tensor, group: dist.ProcessGroup, out: Tensor | None = None) -> Tensor:
    """[n, ...] of every rank -> [n * t, ...]."""
    if group.size() == 1:
        return x
    if out is None:
        out = x.new_empty(_gathered_shape(x, group))
    _all_gather(out, x.contiguous(), group=group)
    return out


def _reduce_scatter_first(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work | None]:
    """[n * t, ...], summed over ranks -> this rank's [n, ...]; wait for the handle to read it."""
    if group.size() == 1:
        return x, None
    assert x.shape[0] % group.size() == 0, (tuple(x.shape), group.size())
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    work = _reduce_scatter(out, x.contiguous(), group=group, async_op=True)
    return out, work


def _gathered_shape(x: Tensor, group: dist.ProcessGroup) -> tuple[int, ...]:
    return (x.shape[0] * group.size(), *x.shape[1:])


def _gather_buffer(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A temporary for the gathered x, shared by all layers where Megatron is set up.

    Megatron's own gathers use the same buffer ("mpu"), so that an adapter next to them adds
    nothing to the peak. Whoever takes it is done with it before the next layer's GEMM is queued
    on the same stream; it must never be saved for backward.
    """
    shape = _gathered_shape(x, group)
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    buffer = getattr(parallel_state, "_GLOBAL_MEMORY_BUFFER", None)
    if buffer is not None:
        out: Tensor = buffer.get_tensor(list(shape), x.dtype, "mpu")
        if out.device == x.device:
            return out
    return x.new_empty(shape)


# --- weight gradient -----------------------------------------------------------------------------


def _add_wgrad(out: Tensor, grad_output: Tensor, x: Tensor) -> None:
    """out += grad_output^T x, for [n, o] and [n, i], accumulated in out's dtype where possible."""
    if grad_output.dtype == out.dtype:
        out.addmm_(grad_output.t(), x)
    elif out.is_cuda and out.dtype == torch.float32 and (kernel := _wgrad_kernel()):
        kernel(x, grad_output, out)
    elif out.is_cuda:
        # Rounds once, as Megatron's DDP hook does; casting the h-wide x to fp32 would cost
        # the memory that this module is there to save.
        out.add_(grad_output.t().matmul(x))
    else:
        out.addmm_(grad_output.t().to(out.dtype), x.to(out.dtype))


def _wgrad_kernel() -> Any:
    """APEX's GEMM that accumulates in fp32, or None; the one that Megatron uses itself."""
    try:
        import fused_weight_gradient_mlp_cuda
    except ImportError:
        return None
    return fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32


def _main_grad_done(weight: Tensor) -> Tensor | None:
    """What backward returns for a weight whose gradient already is in `main_grad`.

    With `grad_added_to_main_grad` a placeholder, since Megatron's hook asserts that there is a
    gradient when it overlaps the reduction (megatron-core 0.16.1
    distributed/distributed_data_parallel.py:436); zeros, because the hook adds the placeholder
    for parameters with `zero_out_wgrad`.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight)


def _wgrad(weight: Tensor, grad_output: Tensor, x: Tensor) -> Tensor | None:
    """Complete weight gradient: into main_grad, or returned. grad_output [n, o], x [n, i]."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return grad_output.t().matmul(x)
    _add_wgrad(main_grad, grad_output, x)
    return _main_grad_done(weight)


def _rows(x: Tensor) -> Tensor:
    """[..., n] -> [rows, n]."""
    return x.reshape(-1, x.shape[-1])


# --- linear layers -------------------------------------------------------------------------------


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
        allreduce_dgrad: bool,
        keep_gathered: bool,
    ) -> Tensor:
        gathered = x
        if sequence_parallel:
            keep_gathered = keep_gathered and ctx.needs_input_grad[1]
            out = None if keep_gathered else _gather_buffer(x, group)
            gathered = _gather_first(x, group, out)
        kept = gathered if keep_gathered else x
        ctx.save_for_backward(kept if ctx.needs_input_grad[1] else None, weight)
        # The attributes of the parameter object (main_grad and its flag) do not survive
        # saved-tensor hooks; the object does.
        ctx.parameter = weight
        ctx.group = group
        ctx.sequence_parallel = sequence_parallel
        ctx.allreduce_dgrad = allreduce_dgrad
        ctx.keep_gathered = keep_gathered
        return gathered.matmul(weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        group = ctx.group
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        grad_x, grad_weight, gather, reduction = None, None, None, None

        # The gather runs under the dgrad GEMM, the dgrad reduction under the wgrad GEMM. On a GPU
        # that order needs CUDA_DEVICE_MAX_CONNECTIONS=1, as in Megatron.
        if needs_wgrad and ctx.sequence_parallel and not ctx.keep_gathered and group.size() > 1:
            gathered = _gather_buffer(x, group)
            gather = _all_gather(gathered, x.contiguous(), group=group, async_op=True)
            x = gathered
        if needs_dgrad:
            grad_x = grad_output.matmul(weight)
            if ctx.sequence_parallel:
                grad_x, reduction = _reduce_scatter_first(grad_x, group)
            elif ctx.allreduce_dgrad and group.size() > 1:
                reduction = dist.all_reduce(grad_x, group=group, async_op=True)
        if needs_wgrad:
            if gather is not None:
                gather.wait()
            grad_weight = _wgrad(ctx.parameter, _rows(grad_output), _rows(x))
        if reduction is not None:
            reduction.wait()
        return grad_x, grad_weight, None, None, None, None


def column_linear(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup,
    *,
    sequence_parallel: bool = False,
    allreduce_dgrad: bool = False,
    keep_gathered: bool = True,
) -> Tensor:
    """x W_p^T with the weight sharded by output, [o/t, i].

    sequence_parallel: x is [s/t, b, i]; it is gathered to [s, b, i], and its gradient
        reduce-scattered. keep_gathered: keep the gathered input for the weight gradient (t times
        the memory, one h-wide gather less in backward).
    allreduce_dgrad: x is [s, b, i], the same on every rank; its gradient is a partial sum over
        ranks and is all-reduced.
    neither: no communication; also right for a weight sharded by input, [o, i/t], whose output
        is a partial sum that the caller reduces.
    """
    assert not (sequence_parallel and allreduce_dgrad)
    return _ColumnLinear.apply(  # type: ignore[no-any-return, no-untyped-call]
        x, weight, group, sequence_parallel, allreduce_dgrad, keep_gathered
    )


class _GatheredWeightLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        full = _gather_first(weight.detach(), group)
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_wgrad else None, full if needs_dgrad else None)
        ctx.parameter = weight
        ctx.group = group
        return x.matmul(full.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, full = ctx.saved_tensors
        weight, group = ctx.parameter, ctx.group
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        grad_x, grad_weight, shard, reduction = None, None, None, None
        # The wgrad comes first, so that its reduce-scatter runs under the dgrad GEMM. It is summed
        # in fp32: rounding every rank's partial sum to bf16 before the sum costs accuracy that
        # base, which sums over the whole sequence in one GEMM, does not lose.
        if needs_wgrad:
            partial = torch.zeros(
                (weight.shape[0] * group.size(), weight.shape[1]),
                dtype=torch.promote_types(weight.dtype, torch.float32),
                device=weight.device,
            )
            _add_wgrad(partial, _rows(grad_output), _rows(x))
            shard, reduction = _reduce_scatter_first(partial, group)
        if needs_dgrad:
            grad_x = grad_output.matmul(full)
        if shard is not None:
            if reduction is not None:
                reduction.wait()
            main_grad = getattr(weight, "main_grad", None)
            if main_grad is None:
                grad_weight = shard.to(weight.dtype)
            else:
                main_grad.add_(shard)
                grad_weight = _main_grad_done(weight)
        return grad_x, grad_weight, None


def gathered_weight_linear(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x W^T for a sequence-local x [s/t, b, i] and a weight sharded by output, [o/t, i].

    Every rank gathers the weight, [o, i], and multiplies its own rows: [s/t, b, o]. The gradient
    of x is complete and local. Only o * i elements move, twice.
    """
    return _GatheredWeightLinear.apply(  # type: ignore[no-any-return, no-untyped-call]
        x, weight, group
    )


# --- mappings ------------------------------------------------------------------------------------


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        if group.size() == 1:
            return x
        # Rank by rank along the first dimension, then side by side along the last.
        parts = _gather_first(x.unsqueeze(0), group)
        return parts.movedim(0, -2).flatten(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        group = ctx.group
        return grad_output.chunk(group.size(), dim=-1)[group.rank()].contiguous(), None


def gather_last(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[..., n/t] -> [..., n]; the gradient, complete on every rank, is cut to the own slice."""
    return _GatherLast.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        if group.size() == 1:
            return x
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return grad_output, None


def reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks; the gradient, complete on every rank, goes through."""
    return _Reduce.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out, work = _reduce_scatter_first(x, group)
        if work is not None:
            work.wait()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return _gather_first(grad_output, ctx.group), None


def reduce_scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Partial sums [s, b, n] -> the sum's rows [s/t, b, n]; the gradient is gathered."""
    return _ReduceScatterSequence.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.chunk(group.size())[group.rank()].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return _gather_first(grad_output, ctx.group), None


def scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[s, b, n], the same on every rank -> own rows [s/t, b, n]; the gradient is gathered."""
    return _ScatterSequence.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


# --- LoRA ----------------------------------------------------------------------------------------


def lora_column(
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    group: dist.ProcessGroup,
    *,
    variant: str = "base",
    sequence_parallel: bool = False,
) -> Tensor:
    """LoRA beside a column-parallel linear: -> [s, b, out/t].

    x: [s/t, b, h] with sequence_parallel, else [s, b, h]; lora_a: [r/t, h]; lora_b: [out/t, r].
    Kept for backward, in elements: base  s*b*h + s*b*r;  regather  s*b*h/t + s*b*r;
    gather-free  s*b*h/t + s*b*r + r*h.
    """
    if variant == "gather-free":
        _check_sequence_parallel(variant, sequence_parallel)
        z_local = gathered_weight_linear(x, lora_a, group)  # [s/t, b, r]
        # Z is gathered over the sequence instead of over r: the same bytes. Each rank's dY_p B_p
        # is a partial sum of dZ, so that its gradient is reduce-scattered and not just cut.
        return column_linear(z_local, lora_b, group, sequence_parallel=True)
    if variant == "regather":
        _check_sequence_parallel(variant, sequence_parallel)
    elif variant != "base":
        raise ValueError(f"unknown LoRA variant {variant!r}")
    z = column_linear(
        x,
        lora_a,
        group,
        sequence_parallel=sequence_parallel,
        allreduce_dgrad=not sequence_parallel,
        keep_gathered=variant == "base",
    )  # [s, b, r/t]
    return column_linear(gather_last(z, group), lora_b, group, allreduce_dgrad=True)


def lora_row(
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    group: dist.ProcessGroup,
    *,
    variant: str = "base",
    sequence_parallel: bool = False,
) -> Tensor:
    """LoRA beside a row-parallel linear: -> [s/t, b, out] with sequence_parallel, else [s, b, out].

    x: [s, b, in/t]; lora_a: [r, in/t]; lora_b: [out/t, r]. Base moves the out-wide output, as
    Megatron-Bridge does; gather-free moves LoRA-B and the r-wide product instead.
    """
    z = column_linear(x, lora_a, group)  # [s, b, r], a partial sum
    if variant == "gather-free":
        _check_sequence_parallel(variant, sequence_parallel)
        return gathered_weight_linear(reduce_scatter_sequence(z, group), lora_b, group)
    if variant != "base":
        raise ValueError(f"unknown LoRA variant for a row-parallel layer: {variant!r}")
    y = column_linear(reduce(z, group), lora_b, group, allreduce_dgrad=True)  # [s, b, out/t]
    y = gather_last(y, group)
    return scatter_sequence(y, group) if sequence_parallel else y


def _check_sequence_parallel(variant: str, sequence_parallel: bool) -> None:
    if not sequence_parallel:
        raise ValueError(f"LoRA variant {variant!r} needs sequence parallelism")
