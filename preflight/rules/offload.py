"""Offloading to host memory."""

from __future__ import annotations

from collections.abc import Iterator

from mtlaunch.preflight.hints import assign
from mtlaunch.preflight.plan import Plan
from mtlaunch.preflight.rule import Finding, rule


@rule(
    "OFF001",
    "cpu-offloading-with-pipeline",
    "error",
    "megatron/core/transformer/transformer_config.py TransformerConfig.__post_init__ "
    "(0.16.1, 0.19.2); NVIDIA skill nemo-mbridge-perf-memory-tuning",
)
def cpu_offloading_with_pipeline(plan: Plan) -> Iterator[Finding]:
    """CPU offloading of layers does not work with pipeline parallelism.

    What it checks
        pipeline-model-parallel-size is 1 when cpu-offloading-num-layers is above 0 (Megatron-LM
        turns offloading on from the number alone) or cpu_offloading is on (Megatron-Bridge).

    Why it fails
        ValueError in TransformerConfig: "Currently there is no support for Pipeline parallelism
        with CPU offloading".

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 8
          pipeline-model-parallel-size: 2
          cpu-offloading-num-layers: 2

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 8
          pipeline-model-parallel-size: 2
          bf16: true
          use-distributed-optimizer: true
          use-precision-aware-optimizer: true
          optimizer-cpu-offload: true

    Stays silent
        With PP at 1, with optimizer-cpu-offload (moves the optimizer's state) and with
        fine-grained-activation-offloading, which all work with a pipeline; with
        cpu-offloading-num-layers alone under Megatron-Bridge, which does nothing there.
    """
    if not plan.cpu_offloading or plan.pp == 1:
        return
    number = plan.cpu_offloading_num_layers
    option = "cpu-offloading-num-layers" if number and not plan.is_bridge else "cpu-offloading"
    value = number if option == "cpu-offloading-num-layers" else True
    yield Finding(
        option,
        f"{assign(plan, option, value)} offloads layers to the CPU, which works with "
        f"PP 1 only, and {plan.spelling('pipeline-model-parallel-size')} is {plan.pp}",
        f"use {assign(plan, 'pipeline-model-parallel-size', 1)}, or drop {plan.spelling(option)}; "
        f"with a pipeline these work: {assign(plan, 'optimizer-cpu-offload')} (with "
        f"{assign(plan, 'use-precision-aware-optimizer')}), "
        f"{assign(plan, 'recompute-granularity', 'selective')}, "
        f"{assign(plan, 'fine-grained-activation-offloading')}",
    )
