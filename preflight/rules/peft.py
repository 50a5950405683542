"""LoRA and other parameter-efficient fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtlaunch.preflight.hints import assign
from mtlaunch.preflight.jobfile import did_you_mean
from mtlaunch.preflight.lora import ROW_SURFACES, SequenceParallelFacts, decide
from mtlaunch.preflight.plan import Plan
from mtlaunch.preflight.rule import Finding, rule

# Linear layers of megatron-core's transformer, MLA, Mamba and MTP blocks, by the last part of their
# names (0.16.1 transformer/attention.py, mlp.py, multi_latent_attention.py, ssm/mamba_mixer.py).
LINEAR_LAYERS = (
    "linear_qkv linear_proj linear_fc1 linear_fc2 linear_q linear_kv linear_q_proj "
    "linear_q_down_proj linear_q_up_proj linear_kv_down_proj linear_kv_up_proj in_proj out_proj "
    "eh_proj output_layer"
).split()


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
        When at least one target module can use the variant, for patterns among the target modules,
        and for a misspelt one (PEF002).
    """
    lora = plan.lora
    if lora is None or lora.sequence_parallel == "base":
        return
    if any("*" in name for name in lora.target_modules):
        return
    if any(misspelt(name) for name in lora.target_modules):
        return  # PEF002
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


def misspelt(name: str) -> str:
    """The layer that a target module's name is a slip of, "" for known and for unlike names."""
    last = name.rsplit(".", 1)[-1]
    if "*" in name or last in LINEAR_LAYERS:
        return ""
    return did_you_mean(last, LINEAR_LAYERS, 0.8)


@rule(
    "PEF002",
    "lora-target-misspelt",
    "error",
    "megatron/core/transformer/attention.py, mlp.py: names of the linear layers",
)
def lora_target_misspelt(plan: Plan) -> Iterator[Finding]:
    """A target module of LoRA is one slip away from a layer's name.

    What it checks
        The last part of each of lora.target_modules is not almost, but not quite, the name of a
        linear layer of megatron-core.

    Why it fails
        A name that matches nothing is left out, and where none matches the ranks end with
        "LoRA attaches to nothing" once the model is built.

    Bad
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: finetune.py
        lora: {target_modules: [linear_qvk]}

    Good
        slurm: {nodes: 1, gpus_per_node: 8}
        entrypoint: finetune.py
        lora: {target_modules: [linear_qkv]}

    Stays silent
        For names unlike any of megatron-core's, which a model of one's own may have, and for
        patterns.
    """
    if plan.lora is None:
        return
    for name in plan.lora.target_modules:
        hint = misspelt(name)
        if hint:
            yield Finding("lora.target_modules", f"no layer is called '{name}'", hint)
