"""Parallel sizes against the world, the heads and each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtlaunch.preflight.arithmetic import (
    EXPERT_TP,
    consistent,
    experts_divide,
    groups_divide,
    heads_divide,
    with_tp,
    world_divides,
)
from mtlaunch.preflight.hints import assign, divisors, either, nearest
from mtlaunch.preflight.plan import Plan
from mtlaunch.preflight.rule import Finding, rule

TP = "tensor-model-parallel-size"
PP = "pipeline-model-parallel-size"
EP = "expert-model-parallel-size"


def legal_tp(plan: Plan) -> list[int]:
    """TP sizes that the whole layout allows, the rest of it as it is."""
    candidates = divisors(plan.num_attention_heads or plan.world_size)
    return [tp for tp in candidates if consistent(with_tp(plan, tp))]


@rule(
    "PAR001",
    "world-indivisible",
    "error",
    "megatron/training/arguments.py validate_args; megatron/core/parallel_state.py "
    "initialize_model_parallel (0.16.1, 0.19.2)",
)
def world_indivisible(plan: Plan) -> Iterator[Finding]:
    """The GPUs of the job do not divide by TP * PP * CP.

    What it checks
        nodes * GPUs a node is a multiple of TP * PP * CP. The quotient is the data-parallel size.

    Why it fails
        AssertionError in validate_args ("world size is not divisible by total_model_size"), for
        Megatron-Bridge in get_data_parallel_size, on every rank after the queue.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 6
          pipeline-model-parallel-size: 3

    Good
        slurm: {nodes: 3, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 6
          pipeline-model-parallel-size: 3

    Stays silent
        Without Megatron arguments. The experts' own grid is PAR002.
    """
    if world_divides(plan):
        return
    size = plan.model_parallel_size
    sizes = [f"TP {plan.tp}", f"PP {plan.pp}"] + ([f"CP {plan.cp}"] if plan.cp > 1 else [])
    # the option that does not divide what the ones before it leave
    left, option = plan.world_size, TP
    for name, value in ((TP, plan.tp), ("context-parallel-size", plan.cp), (PP, plan.pp)):
        if left % value:
            option = name
            break
        left //= value
    # some number of nodes up to `size` more always divides
    fits = [n for n in range(1, plan.nodes + size + 1) if n * plan.ranks_per_node % size == 0]
    fewer = [n for n in fits if n < plan.nodes][-1:]
    more = [n for n in fits if n > plan.nodes][:1]
    yield Finding(
        option,
        f"{plan.world_size} GPUs do not divide by {' x '.join(sizes)} = {size}",
        f"use slurm.nodes: {either(fewer + more)}, or sizes whose product divides "
        f"{plan.world_size}",
    )


@rule(
    "PAR002",
    "expert-grid-indivisible",
    "error",
    "megatron/core/parallel_state.py initialize_model_parallel (0.16.1, 0.19.2); Megatron-Bridge "
    "models/transformer_config.py _set_moe_expert_tensor_parallel_default",
)
def expert_grid_indivisible(plan: Plan) -> Iterator[Finding]:
    """The GPUs of the job do not divide by the experts' grid ETP * EP * PP.

    What it checks
        nodes * GPUs a node is a multiple of expert TP * EP * PP. Expert TP is TP when it is not
        given (Megatron-Bridge: 1 when EP is above 1), which is what surprises people.

    Why it fails
        RuntimeError in parallel_state.initialize_model_parallel: world_size is not divisible by
        expert_tensor_model_pipeline_parallel size. validate_args does not see it.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          num-experts: 8
          tensor-model-parallel-size: 4
          sequence-parallel: true
          expert-model-parallel-size: 4

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          num-experts: 8
          tensor-model-parallel-size: 4
          sequence-parallel: true
          expert-model-parallel-size: 4
          expert-tensor-parallel-size: 1

    Stays silent
        Where the world does not divide by TP * PP * CP either (PAR001).
    """
    if experts_divide(plan) or not world_divides(plan):
        return
    grid = plan.etp * plan.ep * plan.pp
    note = ""
    if EXPERT_TP not in plan.args and plan.etp > 1:
        note = f"; {plan.spelling(EXPERT_TP)} is not given, so ETP is TP"
    fixes = []
    if plan.etp > 1 and experts_divide(replace(plan, etp=1)):
        fixes.append(assign(plan, EXPERT_TP, 1))
    experts = plan.num_experts
    legal = [
        ep
        for ep in divisors(plan.world_size)
        if experts_divide(replace(plan, ep=ep)) and (experts is None or experts % ep == 0)
    ]
    if legal:
        fixes.append(assign(plan, EP, either(nearest(legal, plan.ep, 2))))
    yield Finding(
        EP,
        f"{plan.world_size} GPUs do not divide by the experts' grid ETP {plan.etp} x EP {plan.ep} "
        f"x PP {plan.pp} = {grid}{note}",
        f"use {', or '.join(fixes)}" if fixes else f"use a multiple of {grid} GPUs",
    )


@rule(
    "PAR003",
    "heads-indivisible",
    "error",
    "megatron/core/transformer/transformer_config.py TransformerConfig.__post_init__ "
    "(0.16.1, 0.19.2)",
)
def heads_indivisible(plan: Plan) -> Iterator[Finding]:
    """The attention heads do not divide by TP.

    What it checks
        num-attention-heads is a multiple of tensor-model-parallel-size.

    Why it fails
        ValueError in TransformerConfig: num_attention_heads must be a multiple of
        tensor_model_parallel_size.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          hidden-size: 896
          num-attention-heads: 14
          tensor-model-parallel-size: 4

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          hidden-size: 896
          num-attention-heads: 14
          tensor-model-parallel-size: 2

    Stays silent
        When the number of heads is not known.
    """
    if heads_divide(plan):
        return
    legal = legal_tp(plan)
    yield Finding(
        TP,
        f"{plan.num_attention_heads} attention heads do not divide by TP {plan.tp}",
        f"use {assign(plan, TP, either(nearest(legal, plan.tp)))}"
        if legal
        else "choose a TP that divides the heads",
    )


@rule(
    "PAR004",
    "query-groups-indivisible",
    "error",
    "megatron/core/transformer/transformer_config.py TransformerConfig.__post_init__ "
    "(0.16.1, 0.19.2)",
)
def query_groups_indivisible(plan: Plan) -> Iterator[Finding]:
    """The query groups neither divide by TP nor divide it.

    What it checks
        num-query-groups (the key and value heads) is a multiple or a divisor of
        tensor-model-parallel-size. A divisor is fine: Megatron then replicates the groups.

    Why it fails
        ValueError in TransformerConfig: num_query_groups must be a multiple or divisor of
        tensor_model_parallel_size.

    Bad
        slurm: {nodes: 1, gpus_per_node: 4}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          hidden-size: 768
          num-attention-heads: 12
          group-query-attention: true
          num-query-groups: 3
          tensor-model-parallel-size: 4

    Good
        slurm: {nodes: 1, gpus_per_node: 4}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          hidden-size: 768
          num-attention-heads: 12
          group-query-attention: true
          num-query-groups: 2
          tensor-model-parallel-size: 4

    Stays silent
        Without group-query-attention (the groups are then the heads: PAR003), and where the heads
        do not divide by TP either.
    """
    if groups_divide(plan) or not heads_divide(plan):
        return
    legal = legal_tp(plan)
    yield Finding(
        "num-query-groups",
        f"{plan.num_query_groups} query groups are neither a multiple nor a divisor of TP "
        f"{plan.tp}",
        f"use {assign(plan, TP, either(nearest(legal, plan.tp)))}"
        if legal
        else "choose a TP that divides the query groups",
    )
