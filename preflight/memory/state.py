"""Bytes that every parameter costs between steps: weight, gradient, optimizer state.

Source: megatron/core/distributed/param_and_grad_buffer.py _ParamAndGradBuffer (one contiguous
gradient buffer of all parameters, replicated over data parallel), megatron/core/optimizer/
optimizer.py Float16OptimizerWithFloat16Params, FP32Optimizer and distrib_optimizer.py
DistributedOptimizer (the fp32 copies, on this rank's share only).
"""

from __future__ import annotations

from dataclasses import dataclass

from mtlaunch.preflight.memory.sizes import Sizes, number

# --main-params-dtype and the like of the precision-aware optimizer, in bytes
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

# Optimizer states of one fp32 value each: Adam's two moments, SGD's momentum.
MOMENTS = {"adam": 2, "sgd": 1}


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """Bytes of one parameter on one rank; the last three are divided over `shards` ranks."""

    weight: int
    gradient: int
    master: int  # fp32 copy of a 16-bit weight
    moments: int  # optimizer states
    gradient_copy: int  # fp32 copy of a 16-bit gradient, kept until the next zero_grad
    shards: int

    def weights(self, count: int) -> int:
        return self.weight * count

    def gradients(self, count: int) -> int:
        return self.gradient * count

    def optimizer(self, count: int) -> int:
        """Master weights and optimizer states: (master + moments)/D a parameter."""
        return (self.master + self.moments) * count // self.shards

    def first_step(self, count: int) -> int:
        """What appears only with the first optimizer step: the optimizer states."""
        return self.moments * count // self.shards

    def copies(self, count: int) -> int:
        return self.gradient_copy * count // self.shards

    @property
    def total(self) -> float:
        """Bytes of one parameter, all in: 18 for bf16 without distributed optimizer."""
        own = self.weight + self.gradient
        return own + (self.master + self.moments + self.gradient_copy) / self.shards


def shards(s: Sizes, expert: bool = False) -> int:
    """D: ranks over which the distributed optimizer divides its state.

    DP*CP, for routed experts the expert data-parallel size; divided by
    num_distributed_optimizer_instances. 1 without the distributed optimizer.
    """
    if not (s.plan.distributed_optimizer or s.plan.megatron_fsdp):
        return 1
    ranks = s.edp if expert else s.dp * s.plan.cp
    return max(1, ranks // max(1, number(s.plan, "num-distributed-optimizer-instances", 1)))


def bytes_per_parameter(s: Sizes, expert: bool = False) -> BytesPerParameter:
    """Bytes of a trained parameter.

    bf16 with fp32 gradients: 2 + 4 + 12, with the distributed optimizer 6 + 12/D. bf16 or fp16
    gradients: 2 + 2 + 12 and 4 more, because the optimizer copies them to fp32
    (_copy_model_grads_to_main_grads) and keeps the copy until the next zero_grad; 4 + 16/D. fp32
    training: 4 + 4 + 8 (FP32Optimizer has no master copy), 8 + 8/D. fp32 gradients are the
    default of bf16 and not of fp16 (megatron/training/arguments.py validate_args).
    """
    plan = s.plan
    moments = 4 * MOMENTS.get(plan.optimizer, 2)
    divided = shards(s, expert)
    if s.element == 4:
        return BytesPerParameter(4, 4, 0, moments, 0, divided)
    fp32_gradients = not plan.fp16 and not plan.grad_reduce_in_bf16
    fp32_gradients |= bool(plan.args.get("accumulate-allreduce-grads-in-fp32"))
    gradient = 4 if fp32_gradients else 2
    copy = 0 if fp32_gradients else 4
    master = 4
    if plan.precision_aware_optimizer:
        # master weights and states in the dtypes asked for; gradients are read in theirs
        master = _dtype(s, "main-params-dtype")
        moments = _dtype(s, "exp-avg-dtype") + _dtype(s, "exp-avg-sq-dtype")
        wanted = _dtype(s, "main-grads-dtype")
        copy = 0 if wanted == gradient else wanted
    return BytesPerParameter(2, gradient, master, moments, copy, divided)


def _dtype(s: Sizes, option: str) -> int:
    return DTYPE_BYTES.get(str(s.plan.args.get(option, "fp32")), 4)
