"""Changes that make a job smaller, the cheapest first, each tried with the estimator itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from mtlaunch.preflight.arithmetic import consistent, with_tp
from mtlaunch.preflight.hints import assign
from mtlaunch.preflight.memory.sizes import sizes_of
from mtlaunch.preflight.memory.total import Estimate, estimate
from mtlaunch.preflight.plan import Plan

# A change that saves less than this share is not worth its words.
WORTH = 0.01


@dataclass(frozen=True, slots=True)
class Fix:
    """What to type, the plan that it makes, and the estimate of that."""

    text: str
    plan: Plan
    estimate: Estimate


Change = Callable[[Plan], "tuple[str, Plan] | None"]


def distributed_optimizer(plan: Plan) -> tuple[str, Plan] | None:
    """Divides the optimizer state over DP; 1 to 2% of throughput."""
    if plan.distributed_optimizer or (plan.dp or 1) * plan.cp == 1:
        return None
    text = assign(plan, "use-distributed-optimizer")
    return text, replace(plan, distributed_optimizer=True)


def fused_attention(plan: Plan) -> tuple[str, Plan] | None:
    """Keeps no score matrix, and is faster."""
    s = sizes_of(plan)
    if s is None or not s.unfused_attention or not (plan.bf16 or plan.fp16):
        return None
    changed = replace(plan, transformer_impl="transformer_engine", attention_backend="flash")
    text = assign(plan, "attention-backend", "flash")
    if plan.transformer_impl == "local":
        text = f"{assign(plan, 'transformer-impl', 'transformer_engine')} {text}"
    return text, changed


def recompute_attention(plan: Plan) -> tuple[str, Plan] | None:
    """Recomputes unfused scores; a few percent."""
    s = sizes_of(plan)
    if s is None or not s.unfused_attention or plan.recompute_granularity is not None:
        return None
    changed = replace(plan, recompute_granularity="selective", recompute_modules=("core_attn",))
    return assign(plan, "recompute-granularity", "selective"), changed


def smaller_micro_batch(plan: Plan) -> tuple[str, Plan] | None:
    """Half the activations for twice the microbatches."""
    size = plan.micro_batch_size or 1
    if size == 1:
        return None
    smaller = 1 if size % 2 else size // 2
    return assign(plan, "micro-batch-size", smaller), replace(plan, micro_batch_size=smaller)


def recompute_mlp(plan: Plan) -> tuple[str, Plan] | None:
    """Recomputes dense MLPs; about 16% of throughput on a large dense model."""
    if plan.recompute_granularity not in (None, "selective") or plan.num_experts:
        return None
    if "mlp" in plan.recompute_modules:
        return None
    modules = (*plan.recompute_modules, "mlp")
    changed = replace(plan, recompute_granularity="selective", recompute_modules=modules)
    text = assign(plan, "recompute-granularity", "selective")
    return f"{text} {assign(plan, 'recompute-modules', ' '.join(modules))}", changed


def recompute_everything(plan: Plan) -> tuple[str, Plan] | None:
    """Keeps one hidden tensor a layer; about a third more compute."""
    if plan.recompute_granularity == "full":
        return None
    changed = replace(
        plan,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        recompute_modules=(),
    )
    text = assign(plan, "recompute-granularity", "full")
    text += f" {assign(plan, 'recompute-method', 'uniform')}"
    return f"{text} {assign(plan, 'recompute-num-layers', 1)}", changed


def more_pipeline(plan: Plan) -> tuple[str, Plan] | None:
    """Fewer layers a rank, for a larger pipeline bubble."""
    if plan.vpp is not None or plan.layout is not None:
        return None
    changed = replace(plan, pp=2 * plan.pp)
    return assign(plan, "pipeline-model-parallel-size", changed.pp), changed


def more_tensor_parallel(plan: Plan) -> tuple[str, Plan] | None:
    """Divides everything, for traffic in every layer; within a node only."""
    if 2 * plan.tp > plan.ranks_per_node:
        return None
    changed = replace(with_tp(plan, 2 * plan.tp), sequence_parallel=True)
    text = assign(plan, "tensor-model-parallel-size", changed.tp)
    if not plan.args.get("sequence-parallel"):  # as the job file has it
        text += f" {assign(plan, 'sequence-parallel')}"
    return text, changed


# cheapest first, TP last; of one kind the later replaces the earlier
CHANGES: tuple[tuple[str, Change], ...] = (
    ("optimizer", distributed_optimizer),
    ("attention", fused_attention),
    ("recompute", recompute_attention),
    ("micro batch", smaller_micro_batch),
    ("recompute", recompute_mlp),
    ("recompute", recompute_everything),
    ("pipeline", more_pipeline),
    ("tensor", more_tensor_parallel),
)


def applied(change: Change, plan: Plan, before: Estimate) -> Fix | None:
    """A change, repeated until the job fits or nothing more is to be had; None when useless."""
    last: Fix | None = None
    while before.fits != "yes":
        changed = change(plan)
        if changed is None or not consistent(changed[1]):
            break
        text, plan = changed
        after = estimate(plan)
        if after is None or after.worst.device_bytes > (1 - WORTH) * before.worst.device_bytes:
            break
        last, before = Fix(text, plan, after), after
    return last


def single_fixes(plan: Plan) -> Iterator[Fix]:
    """Changes that save something, each on its own."""
    before = estimate(plan)
    for _, change in CHANGES if before is not None else ():
        assert before is not None
        fix = applied(change, plan, before)
        if fix is not None:
            yield fix


def combined_fix(plan: Plan) -> Fix | None:
    """The changes one on top of the other, cheapest first, until it fits; None when it never does.

    A change that the later ones make useless is not taken out again.
    """
    before = estimate(plan)
    texts: dict[str, str] = {}
    tight: Fix | None = None
    for kind, change in CHANGES if before is not None else ():
        assert before is not None
        step = applied(change, plan, before)
        if step is None:
            continue
        texts[kind] = step.text
        plan, before = step.plan, step.estimate
        fix = Fix(" ".join(texts.values()), plan, before)
        if before.fits == "yes":
            return fix
        if before.fits == "tight" and tight is None:
            tight = fix
    return tight
