"""Builds megatron-core's GPTModel for each pipeline rank and prints its parameter counts.

Run by test_parameters.py in a process of its own: stdin is a JSON list of option mappings, stdout
one list of counts a case. The process group is torch's fake one, so any layout can be built here.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch.testing._internal.distributed.fake_pg import FakeStore


def _norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    norm = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
    return norm(hidden_size, eps=eps)


# torch_norm.py refuses sequence parallelism; the parameters are the same
WrappedTorchNorm.__new__ = _norm

if not torch.cuda.is_available():
    # a tied copy moves to the GPU (language_module.py), the MoE dispatcher opens a stream
    torch.cuda.Stream = lambda *_, **__: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.cuda.current_device = lambda: torch.device("cpu")


def count(case: dict[str, Any], rank: int) -> int:
    tp, pp, vpp = case["tp"], case["pp"], case["vpp"]
    torch.distributed.init_process_group(
        "fake", rank=rank * tp, world_size=tp * pp, store=FakeStore()
    )
    parallel_state.initialize_model_parallel(
        tp,
        pp,
        vpp,
        expert_model_parallel_size=case["ep"],
        expert_tensor_parallel_size=case["etp"],
        create_gloo_process_groups=False,
    )
    options = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "sequence_parallel": tp > 1,
        "pipeline_dtype": torch.bfloat16,
        "params_dtype": torch.bfloat16,
        "use_cpu_initialization": True,
        "perform_initialization": False,
    } | case["config"]
    if options.get("gated_linear_unit"):
        options["activation_func"] = torch.nn.functional.silu
    config = TransformerConfig(**options)
    total = 0
    for stage in range(vpp or 1):
        virtual = {} if vpp is None else {"vp_stage": stage}
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(
                num_experts=options.get("num_moe_experts"),
                qk_layernorm=options.get("qk_layernorm", False),
                normalization=options.get("normalization", "LayerNorm"),
            ),
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **virtual),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **virtual),
            **virtual,
            **case["model"],
        )
        total += sum(parameter.numel() for parameter in model.parameters())
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return total


def main() -> None:
    cases = json.load(sys.stdin)
    counts = [[count(case, rank) for rank in range(case["pp"])] for case in cases]
    print("counts", json.dumps(counts))


if __name__ == "__main__":
    main()
