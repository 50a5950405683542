"""Which LoRA layer uses which sequence-parallel variant, decided without torch.

A job file names one variant (`lora.sequence_parallel`); not every layer can use it. This table
says which do, and why the others take the base path, so that a job whose setting can have no
effect hears it before it queues. `kernels/eligibility.py` decides the same inside the training
process, from the real modules; tests/kernels/test_eligibility.py compares the two over a grid.

Source: Megatron-Bridge 0.6 src/megatron/bridge/peft/utils.py
`ParallelLinearAdapter._sequence_parallel_input_regather_eligibility` for `regather`. What
`gather-free` leaves out of it follows from what each of them saves: gather-free keeps no gathered
activation, so recomputation and the row-parallel layers need no exception.
"""

from __future__ import annotations

from dataclasses import dataclass

VARIANTS = ("base", "regather", "gather-free")

COLUMN_SURFACES = ("linear_qkv", "linear_fc1")
ROW_SURFACES = ("linear_proj", "linear_fc2")


@dataclass(frozen=True)
class SequenceParallelFacts:
    """What the decision depends on besides the layer's name."""

    variant: str  # as in the job file: base, regather or gather-free
    tp: int = 1
    sequence_parallel: bool = False
    is_expert: bool = False
    cuda_graphs: bool = False
    cpu_offload_activations: bool = False
    recompute_granularity: str | None = None  # None, "selective" or "full"
    recompute_modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """The variant that a layer uses, and why when it is not the one asked for."""

    uses: str
    reason: str | None = None


def decide(surface: str, facts: SequenceParallelFacts) -> Decision:
    """The variant of one layer, `surface` being the last part of its name, e.g. `linear_qkv`.

    The first reason that applies is given, those that hold for the whole job before those of
    one layer. Raises ValueError for a variant that is not one of VARIANTS.
    """
    if facts.variant not in VARIANTS:
        raise ValueError(f"unknown LoRA variant {facts.variant!r}; known: {', '.join(VARIANTS)}")
    if facts.variant == "base":
        return Decision("base")
    reason = _reason_against(surface, facts)
    return Decision("base", reason) if reason else Decision(facts.variant)


def _reason_against(surface: str, facts: SequenceParallelFacts) -> str | None:
    regather = facts.variant == "regather"
    if facts.tp <= 1:
        return "tensor-parallel size 1: no input to gather"
    if not facts.sequence_parallel:
        return "sequence parallelism is off: no input to gather"
    if facts.is_expert:
        return "expert: its input is not sequence-parallel"
    if surface in ROW_SURFACES:
        if regather:
            return "row-parallel: its LoRA-A input is not gathered"
    elif surface not in COLUMN_SURFACES:
        return f"not one of {', '.join(COLUMN_SURFACES)}"
    if facts.cuda_graphs:
        return "CUDA graphs are on"
    if facts.cpu_offload_activations:
        return "CPU offload of activations is on"
    if regather and facts.recompute_granularity == "full":
        return "full recompute already drops the gathered input"
    if (
        regather
        and surface == "linear_fc1"
        and facts.recompute_granularity == "selective"
        and "mlp" in facts.recompute_modules
    ):
        return "selective recompute of mlp already drops the gathered input"
    return None
