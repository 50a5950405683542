"""LoRA adapters beside Megatron's parallel linear layers.

Sharding, names and defaults are those of Megatron-Bridge's ParallelLinearAdapter
(src/megatron/bridge/peft/utils.py), so that its checkpoints, merge and export see what they know:

                    linear_in (LoRA-A)        linear_out (LoRA-B)
    column-parallel [r/t, h],  dim 0          [out/t, r], dim 0
    row-parallel    [r, in/t], dim 1          [out/t, r], dim 0

A base layer's own state-dict keys stay as they are; the adapter's are `adapter.linear_in.weight`
and `adapter.linear_out.weight` beside them.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mtlaunch.kernels import ops


class LoRAWeight(nn.Module):
    """One LoRA matrix, sharded over the tensor-parallel group along `partition_dim`.

    The attributes on the parameter are Megatron's: the gradient norm counts a shard on every rank
    only with `tensor_model_parallel` (megatron-core 0.16.1 tensor_parallel/layers.py:89), and DDP
    puts it into the expert buffers without `allreduce`
    (distributed/distributed_data_parallel.py:122). `sequence_parallel` is left unset: Megatron
    would sum such gradients over the group, and these are complete.
    """

    def __init__(
        self,
        full: Tensor,
        partition_dim: int,
        group: dist.ProcessGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
        allreduce: bool = True,
    ) -> None:
        super().__init__()
        shard = full.chunk(group.size(), dim=partition_dim)[group.rank()]
        self.weight = nn.Parameter(shard.to(device=device, dtype=dtype).clone().contiguous())
        self.partition_dim = partition_dim
        self.group = group
        attributes = {
            "tensor_model_parallel": True,
            "partition_dim": partition_dim,
            "partition_stride": 1,
            "allreduce": allreduce,
        }
        for name, value in attributes.items():
            setattr(self.weight, name, value)

    def extra_repr(self) -> str:
        return f"shape={tuple(self.weight.shape)}, partition_dim={self.partition_dim}"

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """As ColumnParallelLinear's (megatron-core 0.16.1 tensor_parallel/layers.py:1060)."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        # megatron-core before 0.15 takes neither group and finds them itself.
        groups = {}
        if metadata is not None and "dp_cp_group" in metadata:
            groups = {"tp_group": self.group, "dp_cp_group": metadata["dp_cp_group"]}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": self.partition_dim},
            sharded_offsets,
            **groups,
        )
        return sharded


class ParallelLinearAdapter(nn.Module):
    """B A x * alpha / dim, sharded as the linear layer that it stands beside.

    group: the layer's tensor-parallel group. variant: base, regather or gather-free, see ops.py.
    sequence_parallel: whether the layer's input (column) or output (row) is sequence-sharded.
    gather_output: whether a column-parallel layer gathers its output.
    generator: draws LoRA-A (Xavier normal over the whole matrix, as Megatron-Bridge; LoRA-B is
        zero). Every rank draws the whole matrix and keeps its shard, so that a generator with the
        same seed on all ranks gives equal replicas, and the same matrix for any group size,
        without touching the random state of the script.

    Raises ValueError when dim does not split over the group.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dim: int,
        *,
        group: dist.ProcessGroup,
        row_parallel: bool,
        generator: torch.Generator,
        alpha: float | None = None,
        dropout: float = 0.0,
        variant: str = "base",
        sequence_parallel: bool = False,
        gather_output: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        allreduce: bool = True,
    ) -> None:
        super().__init__()
        if not row_parallel and dim % group.size():
            raise ValueError(
                f"LoRA dim {dim} does not split over tensor-parallel size {group.size()}; "
                f"use a multiple of {group.size()}"
            )
        assert in_features % (group.size() if row_parallel else 1) == 0
        assert out_features % group.size() == 0
        self.group = group
        self.row_parallel = row_parallel
        self.variant = variant
        self.sequence_parallel = sequence_parallel
        self.gather_output = gather_output
        self.dim = dim
        self.scale = (dim if alpha is None else alpha) / dim
        self.dropout = dropout

        lora_a = torch.empty(dim, in_features)
        nn.init.xavier_normal_(lora_a, generator=generator)
        device = torch.device(device)
        self.linear_in = LoRAWeight(
            lora_a,
            1 if row_parallel else 0,
            group,
            dtype=dtype,
            device=device,
            allreduce=allreduce,
        )
        self.linear_out = LoRAWeight(
            torch.zeros(out_features, dim),
            0,
            group,
            dtype=dtype,
            device=device,
            allreduce=allreduce,
        )

    def extra_repr(self) -> str:
        kind = "row" if self.row_parallel else "column"
        return f"{kind}-parallel, variant={self.variant}, dim={self.dim}, scale={self.scale}"

    def forward(self, x: Tensor) -> Tensor:
        """The shapes of the layer beside it: ops.lora_column and ops.lora_row."""
        if self.dropout > 0.0 and self.training:
            with self._dropout_rng():
                x = nn.functional.dropout(x, self.dropout)
        lora = ops.lora_row if self.row_parallel else ops.lora_column
        y = lora(
            x,
            self.linear_in.weight,
            self.linear_out.weight,
            self.group,
            variant=self.variant,
            sequence_parallel=self.sequence_parallel,
        )
        if self.gather_output:
            y = ops.gather_last(y, self.group)
        return y.mul(self.scale)

    def _dropout_rng(self) -> Any:
        """The ranks hold different parts of x and must not drop the same places in each."""
        if self.group.size() == 1 or not (self.row_parallel or self.sequence_parallel):
            return nullcontext()
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        return get_cuda_rng_tracker().fork()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            **self.linear_in.sharded_state_dict(f"{prefix}linear_in.", sharded_offsets, metadata),
            **self.linear_out.sharded_state_dict(f"{prefix}linear_out.", sharded_offsets, metadata),
        }


class LoRALinear(nn.Module):
    """A Megatron linear layer with an adapter added to its output.

    Takes the place of `to_wrap` in its parent: the same (output, bias) is returned, the same
    state-dict keys hold the base, and every other attribute that Megatron looks up on a linear
    layer (weight, backward_dw, layer_norm_weight ...) is the base's.
    """

    def __init__(self, to_wrap: nn.Module, adapter: ParallelLinearAdapter) -> None:
        super().__init__()
        self.to_wrap = to_wrap
        self.adapter = adapter
        self.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
            _drop_wrapper_from_keys
        )
        self.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            _add_wrapper_to_keys
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "to_wrap":  # asked for before it is set
                raise
            return getattr(self.to_wrap, name)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias, adapter_input = self._base_forward(x, *args, **kwargs)
        return output + self.adapter(adapter_input), bias

    def _base_forward(
        self, x: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """(output, bias, adapter input); they differ from (x W^T, b, x) for a fused LayerNorm."""
        base: Any = self.to_wrap
        if hasattr(base, "return_layernorm_output"):
            # Transformer Engine's LayerNorm-linear: the adapter needs the normed input, and takes
            # the sequence-local one. Set on every call, for Megatron-Bridge's export code sets
            # the second flag back. Not run with the real Transformer Engine yet.
            base.return_layernorm_output = True
            base.return_layernorm_output_gathered = False
        result = base(x, *args, **kwargs)
        # Megatron's Transformer Engine layers return (out, bias), ((out, normed), None) or
        # (out, bias, normed), megatron-core 0.16.1 extensions/transformer_engine.py:905.
        if len(result) == 3:
            output, bias, normed = result
            return output, bias, normed
        output, bias = result
        if isinstance(output, tuple):
            output, normed = output
            return output, bias, normed
        return output, bias, x

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        base: Any = self.to_wrap
        return {
            **base.sharded_state_dict(prefix, sharded_offsets, metadata),
            **self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata),
        }


_WRAPPED = "to_wrap."


def _drop_wrapper_from_keys(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: dict[str, Any]
) -> None:
    wrapped = prefix + _WRAPPED
    for key in [key for key in state_dict if key.startswith(wrapped)]:
        state_dict[prefix + key[len(wrapped) :]] = state_dict.pop(key)


def _add_wrapper_to_keys(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_unused: Any
) -> None:
    adapter = prefix + "adapter."
    keys = [key for key in state_dict if key.startswith(prefix)]
    for key in keys:
        if not key.startswith((adapter, prefix + _WRAPPED)):
            state_dict[prefix + _WRAPPED + key[len(prefix) :]] = state_dict.pop(key)
    if keys and not any(key.startswith(adapter) for key in keys):
        # A checkpoint of the base model: the adapter starts as it was initialised.
        assert isinstance(module, LoRALinear)
        for name, value in module.adapter.state_dict().items():
            state_dict[adapter + name] = value
