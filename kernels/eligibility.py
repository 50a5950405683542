"""Which sequence-parallel variant each LoRA layer gets, decided from the model that was built.

The same table as `mtlaunch.preflight.lora`, which has only the job file to go by; the two import
nothing of each other, and tests/kernels/test_eligibility.py holds them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VARIANTS = ("base", "regather", "gather-free")

# The layers whose input is the sequence-sharded LayerNorm output, [s/tp, b, h].
COLUMN_SURFACES = ("linear_qkv", "linear_fc1")
# The layers whose output is reduce-scattered to that shape.
ROW_SURFACES = ("linear_proj", "linear_fc2")


@dataclass(frozen=True)
class Layer:
    """One parallel linear layer of the model, as far as the decision needs it."""

    surface: str  # last part of its name, e.g. linear_qkv
    row_parallel: bool
    is_expert: bool
    tp: int
    sequence_parallel: bool


@dataclass(frozen=True)
class Decision:
    """The variant that a layer uses, and why when it is not the one asked for."""

    uses: str
    reason: str | None = None


def decide(variant: str, layer: Layer, config: Any) -> Decision:
    """The variant of `layer` when the job asks for `variant`.

    config: megatron.core TransformerConfig; only attributes are read, so that an older or newer
    one that lacks some of them counts as having the feature off.
    """
    if variant not in VARIANTS:
        raise ValueError(f"unknown LoRA variant {variant!r}; known: {', '.join(VARIANTS)}")
    if variant == "base":
        return Decision("base")
    reason = _reason_against(variant, layer, config)
    return Decision("base", reason) if reason else Decision(variant)


def _reason_against(variant: str, layer: Layer, config: Any) -> str | None:
    # Gather-free keeps no gathered activation, so that recomputation and row-parallel layers,
    # which Megatron-Bridge excludes from its re-gather, are no exception to it.
    regather = variant == "regather"
    if layer.tp <= 1:
        return "tensor-parallel size 1: no input to gather"
    if not layer.sequence_parallel:
        return "sequence parallelism is off: no input to gather"
    if layer.is_expert:
        return "expert: its input is not sequence-parallel"
    if layer.row_parallel and layer.surface in ROW_SURFACES:
        if regather:
            return "row-parallel: its LoRA-A input is not gathered"
    elif layer.row_parallel or layer.surface not in COLUMN_SURFACES:
        return f"not one of {', '.join(COLUMN_SURFACES)}"
    if uses_cuda_graphs(config):
        return "CUDA graphs are on"
    if getattr(config, "cpu_offloading", False) and getattr(
        config, "cpu_offloading_activations", False
    ):
        return "CPU offload of activations is on"
    granularity = getattr(config, "recompute_granularity", None)
    if regather and granularity == "full":
        return "full recompute already drops the gathered input"
    if (
        regather
        and layer.surface == "linear_fc1"
        and granularity == "selective"
        and "mlp" in (getattr(config, "recompute_modules", None) or ())
    ):
        return "selective recompute of mlp already drops the gathered input"
    return None


def uses_cuda_graphs(config: Any) -> bool:
    """Whether a TransformerConfig captures CUDA graphs.

    `cuda_graph_impl`, and the two deprecated flags that came before it
    (megatron-core 0.16.1 transformer/transformer_config.py:751, 772, 776).
    """
    return (
        getattr(config, "cuda_graph_impl", None) not in (None, "none")
        or bool(getattr(config, "enable_cuda_graph", False))
        or bool(getattr(config, "external_cuda_graph", False))
    )
