"""Base against the same adapter composed of Megatron's own layers, as Megatron-Bridge does it.

Source of the composition: Megatron-Bridge src/megatron/bridge/peft/utils.py,
ParallelLinearAdapter.__init__ and .forward. Prints the largest absolute difference of each tensor
as JSON, {"column fp32": {"y": 0.0, ...}, ...}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor

from mtlaunch.kernels import ops

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "tiny-lora"))
import cpu_megatron  # noqa: E402

S, B, IN, RANK, OUT = 16, 3, 24, 8, 40  # whole sizes; all but B split over the ranks


def bridge_layers(column: bool, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module]:
    config = ModelParallelConfig(
        tensor_model_parallel_size=dist.get_world_size(),
        # Bridge turns it off while it builds the layers and calls the mappings itself.
        sequence_parallel=False,
        use_cpu_initialization=True,
        params_dtype=dtype,
        gradient_accumulation_fusion=False,
    )
    shared = {"config": config, "bias": False, "init_method": torch.nn.init.xavier_normal_}
    if column:
        linear_in = ColumnParallelLinear(
            IN, RANK, gather_output=True, disable_grad_reduce=True, **shared
        )
    else:
        linear_in = RowParallelLinear(
            IN, RANK, input_is_parallel=True, skip_bias_add=True, **shared
        )
    return linear_in, ColumnParallelLinear(RANK, OUT, gather_output=not column, **shared)


def results(y: Tensor, dy: Tensor, x: Tensor, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    dx, da, db = torch.autograd.grad(y, (x, a, b), dy)
    return {"y": y.detach(), "dx": dx, "da": da, "db": db}


def compare(column: bool, dtype: torch.dtype) -> dict[str, float]:
    group = parallel_state.get_tensor_model_parallel_group()
    rank, size = group.rank(), group.size()
    linear_in, linear_out = bridge_layers(column, dtype)
    a, b = linear_in.weight, linear_out.weight
    generator = torch.Generator().manual_seed(rank)
    shapes = (
        [(S // size, B, IN), (S, B, OUT // size)]
        if column
        else [
            (S, B, IN // size),
            (S // size, B, OUT),
        ]
    )
    x, dy = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    x.requires_grad_()

    if column:
        y, _ = linear_out(linear_in(gather_from_sequence_parallel_region(x))[0])
    else:
        y, _ = linear_out(linear_in(x)[0])
        y = scatter_to_sequence_parallel_region(y)
    theirs = results(y, dy, x, a, b)
    lora = ops.lora_column if column else ops.lora_row
    ours = results(lora(x, a, b, group, sequence_parallel=True), dy, x, a, b)
    return {name: float((ours[name] - theirs[name]).abs().max()) for name in ours}


def main() -> None:
    torch.set_num_threads(1)
    cpu_megatron.install()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(dist.get_world_size())
    torch.manual_seed(0)
    found = {
        f"{'column' if column else 'row'} {name}": compare(column, dtype)
        for column in (True, False)
        for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items()
    }
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
