"""Batch sizes."""

from __future__ import annotations

from collections.abc import Iterator

from mtlaunch.preflight.arithmetic import batch_divides
from mtlaunch.preflight.hints import assign
from mtlaunch.preflight.plan import Plan
from mtlaunch.preflight.rule import Finding, rule

GBS = "global-batch-size"
MBS = "micro-batch-size"
DECREASE = "decrease-batch-size-if-needed"


@rule(
    "DAT001",
    "global-batch-indivisible",
    "error",
    "megatron/core/num_microbatches_calculator.py ConstantNumMicroBatchesCalculator "
    "(0.16.1, 0.19.2); megatron/training/arguments.py validate_args (0.19.2)",
)
def global_batch_indivisible(plan: Plan) -> Iterator[Finding]:
    """The global batch does not split evenly over the data-parallel ranks.

    What it checks
        global-batch-size is a multiple of micro-batch-size * DP, in samples, with
        DP = GPUs / (TP * PP * CP).

    Why it fails
        AssertionError when the microbatch calculator is built, at start-up on every rank. From
        megatron-core 0.19 on validate_args asserts it first, for the evaluation's batch, which is
        the global batch when not given; so decrease-batch-size-if-needed no longer helps.

    Bad
        slurm: {nodes: 4, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          tensor-model-parallel-size: 8
          micro-batch-size: 2
          global-batch-size: 516

    Good
        slurm: {nodes: 4, gpus_per_node: 8}
        entrypoint: pretrain_gpt.py
        args:
          num-layers: 4
          tensor-model-parallel-size: 8
          micro-batch-size: 2
          global-batch-size: 512

    Stays silent
        With decrease-batch-size-if-needed where one micro-batch a rank is left (Megatron rounds
        down itself) before megatron-core 0.19 or with the evaluation's own batch sizes, with
        step-batch-size-schedule or, before megatron-core 0.19, rampup-batch-size, with
        tensor-parallel-num-weight-shards (changes DP), without global-batch-size (Megatron takes
        micro batch * DP), and where the GPUs do not divide by TP * PP * CP (PAR001).
    """
    if batch_divides(plan):
        return
    gbs, mbs, dp = plan.global_batch_size, plan.micro_batch_size, plan.dp
    assert gbs is not None and mbs is not None and dp is not None
    if mbs < 1:
        return
    step = mbs * dp
    near = max(step, gbs // step * step)
    note = ""
    if plan.args.get(DECREASE) and gbs > step:
        note = f"; {plan.spelling(DECREASE)} does not help: evaluation takes {gbs} as it is"
    yield Finding(
        GBS,
        f"{gbs} does not split into micro-batches of {mbs} over {dp} data-parallel ranks "
        f"({mbs} x {dp} = {step}){note}",
        f"use {assign(plan, GBS, near)} or {near + step}",
    )
