"""The divisibilities of a layout, as predicates of a Plan.

Rules report the one that fails; hints are only offered when all of them hold for the changed plan.
What cannot be decided counts as holding.
"""

from __future__ import annotations

from dataclasses import replace

from mtlaunch.preflight import layers
from mtlaunch.preflight.plan import Plan

EXPERT_TP = "expert-tensor-parallel-size"


def world_divides(plan: Plan) -> bool:
    return plan.world_size % plan.model_parallel_size == 0


def experts_divide(plan: Plan) -> bool:
    return plan.world_size % (plan.etp * plan.ep * plan.pp) == 0


def heads_divide(plan: Plan) -> bool:
    return plan.num_attention_heads is None or plan.num_attention_heads % plan.tp == 0


def groups_divide(plan: Plan) -> bool:
    groups = plan.num_query_groups
    return groups is None or groups % plan.tp == 0 or plan.tp % groups == 0


def batch_is_fixed(plan: Plan) -> bool:
    """Whether global batch and data-parallel size are what the arguments say all along."""
    changing = (
        "step-batch-size-schedule",
        "tensor-parallel-num-weight-shards",  # changes the data-parallel size
    )
    # rampup-batch-size is accepted and ignored from 0.19 on
    ramps = plan.args.get("rampup-batch-size") and plan.core_before(0, 19)
    return not ramps and not any(plan.args.get(name) for name in changing)


def batch_divides(plan: Plan) -> bool:
    if None in (plan.global_batch_size, plan.micro_batch_size, plan.dp):
        return True
    if not batch_is_fixed(plan):
        return True
    if evaluation_takes_global_batch(plan):
        assert plan.global_batch_size and plan.micro_batch_size and plan.dp
        return plan.global_batch_size % (plan.micro_batch_size * plan.dp) == 0
    return plan.num_microbatches is not None


def evaluation_takes_global_batch(plan: Plan) -> bool:
    """Whether validate_args wants the global batch to divide even where training rounds it down.

    From 0.19 on it checks the evaluation's batch, which is the global batch when not given.
    """
    given = plan.args.get("eval-global-batch-size") or plan.args.get("eval-micro-batch-size")
    return not plan.is_bridge and not plan.core_before(0, 19) and not given


def group_fits(count: int, group: int, pp: int) -> bool:
    """The interleaved schedule's conditions on `count` microbatches in groups of `group`.

    forward_backward_pipelining_with_interleaving (megatron/core/pipeline_parallel/schedules.py).
    """
    return pp <= group <= count and not 0 < count % group < pp


def microbatches_fit(plan: Plan) -> bool:
    count = plan.num_microbatches
    if plan.vpp is None or plan.pp == 1 or count is None or not batch_is_fixed(plan):
        return True
    if plan.is_bridge and plan.global_batch_size is None:
        return True  # its default is not Megatron-LM's
    return group_fits(count, plan.microbatch_group_size or plan.pp, plan.pp)


def virtual_stages_have_pipeline(plan: Plan) -> bool:
    return plan.vpp is None or plan.pp > 1


def layers_divide(plan: Plan) -> bool:
    return plan.num_layers is None or layers.chunks(plan) is not None


def consistent(plan: Plan) -> bool:
    """All of the above."""
    checks = (
        world_divides,
        experts_divide,
        heads_divide,
        groups_divide,
        batch_divides,
        microbatches_fit,
        virtual_stages_have_pipeline,
        layers_divide,
    )
    return all(check(plan) for check in checks)


def with_tp(plan: Plan, tp: int) -> Plan:
    """The plan at another TP; expert TP follows where it was not given."""
    follows = EXPERT_TP not in plan.args and plan.etp == plan.tp
    return replace(plan, tp=tp, etp=tp if follows else plan.etp)


def with_pp(plan: Plan, pp: int) -> Plan:
    """The plan at another PP; virtual stages follow from the layers of each."""
    each, total = plan.layers_per_virtual_stage, counted_layers(plan)
    if each is None:
        return replace(plan, pp=pp)
    virtual = total // pp // each
    return replace(plan, pp=pp, vpp=virtual if virtual > 1 else None)


def counted_layers(plan: Plan) -> int:
    """Layers of an even split: an embedding or loss that counts as one is included."""
    assert plan.num_layers is not None
    return plan.num_layers + plan.account_for_embedding + plan.account_for_loss
