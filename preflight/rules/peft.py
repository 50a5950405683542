"""LoRA and other parameter-efficient fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtlaunch.preflight.hints import assign
from mtlaunch.preflight.lora import ROW_SURFACES, SequenceParallelFacts, decide
from mtlaunch.preflight.plan import Plan
from mtlaunch.preflight.rule import Finding, rule


def facts_of(plan: Plan, variant: str) -> SequenceParallelFacts:
    offload = plan.cpu_offloading and bool(plan.args.get("cpu-offloading-activations", True))
    return SequenceParallelFacts(
        variant=variant,
        tp=plan.tp,
        sequence_parallel=plan.sequence_parallel,
        cuda_graphs=plan.cuda_graph_impl != "none",
        cpu_offload_activations=offload,
        recompute_granularity=plan.recompute_granularity,
        recompute_modules=plan.recompute_modules,
    )


def effect(plan: Plan, variant: str) -> tuple[bool, list[str]]:
    """Whether a variant changes any target module, and the reasons of those that it does not."""
    assert plan.lora is not None
    facts = facts_of(plan, variant)
    names = [name.rsplit(".", 1)[-1] for name in plan.lora.target_modules]
    decisions = [decide(name, facts) for name in names]
    works = any(decision.uses == variant for decision in decisions)
    # that a row-parallel layer never uses it is news only where there is no other layer
    telling = [
        decision.reason
        for name, decision in zip(names, decisions, strict=True)
        if decision.reason and (name not in ROW_SURFACES or set(names) <= set(ROW_SURFACES))
    ]
    return works, list(dict.fromkeys(telling))


@rule(
    "PEF001",
    "lora-variant-without-effect",
    "warning",
    "Megatron-Bridge src/megatron/bridge/peft/utils.py ParallelLinearAdapter."
    "_sequence_parallel_input_regather_eligibility",
)
def lora_variant_without_effect(plan: Plan) -> Iterator[Finding]:
    """lora.sequence_parallel asks for a variant that no layer can use.

    What it checks
        With lora.sequence_parallel of regather or gather-free, at least one of the target modules
        can use it: TP is above 1 with sequence parallelism on, CUDA graphs and CPU offloading of
        activations are off, and, for regather, recomputation is not full and a column-parallel
        layer (linear_qkv, linear_fc1) is among the targets.

    Why it fails
        It does not fail: every adapter falls back to the base path in silence, so the memory that
        the option was to save stays in use.

    Bad
        slurm: {nodes: 1, gpus_per_node: 2}
        entrypoint: finetune.py
        args:
          num-layers: 4
          tensor-model-parallel-size: 2
        lora: {sequence_parallel: regather}

    Good
        slurm: {nodes: 1, gpus_per_node: 2}
        entrypoint: finetune.py
        args:
          num-layers: 4
          tensor-model-parallel-size: 2
          sequence-parallel: true
        lora: {sequence_parallel: regather}

    Stays silent
        When at least one target module can use the variant, and for patterns among the target
        modules.
    """
    lora = plan.lora
    if lora is None or lora.sequence_parallel == "base":
        return
    if any("*" in name for name in lora.target_modules):
        return
    variant = lora.sequence_parallel
    works, reasons = effect(plan, variant)
    if works:
        return
    fixes = ["set lora.sequence_parallel: base"]
    if plan.tp > 1 and effect(replace(plan, sequence_parallel=True), variant)[0]:
        fixes.insert(0, f"add {assign(plan, 'sequence-parallel')}")
    elif variant == "regather" and effect(plan, "gather-free")[0]:
        fixes.insert(0, "use lora.sequence_parallel: gather-free")
    yield Finding(
        "lora.sequence_parallel",
        f"{variant} changes none of {', '.join(lora.target_modules)}: {'; '.join(reasons)}",
        ", or ".join(fixes),
    )
