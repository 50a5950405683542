"""The training process decides what preflight announced, layer by layer."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from mtlaunch.kernels import eligibility
from mtlaunch.preflight import lora
from mtlaunch.preflight.lora import SequenceParallelFacts

SURFACES = {  # name -> row-parallel
    "linear_qkv": False,
    "linear_fc1": False,
    "linear_proj": True,
    "linear_fc2": True,
    "linear_q_up_proj": False,  # multi-latent attention
    "in_proj": False,  # Mamba
    "out_proj": True,
    "output_layer": False,
}

RECOMPUTE = [
    (None, ()),
    ("full", ()),
    ("selective", ("core_attn",)),
    ("selective", ("core_attn", "mlp")),
    (None, ("mlp",)),
]


def grid():
    flags = [False, True]
    for variant, tp, sp, expert, graphs, offload, (granularity, modules) in itertools.product(
        lora.VARIANTS, [1, 2, 4], flags, flags, flags, flags, RECOMPUTE
    ):
        yield SequenceParallelFacts(
            variant=variant,
            tp=tp,
            sequence_parallel=sp,
            is_expert=expert,
            cuda_graphs=graphs,
            cpu_offload_activations=offload,
            recompute_granularity=granularity,
            recompute_modules=modules,
        )


def in_kernels(surface: str, facts: SequenceParallelFacts) -> eligibility.Decision:
    layer = eligibility.Layer(
        surface=surface,
        row_parallel=SURFACES[surface],
        is_expert=facts.is_expert,
        tp=facts.tp,
        sequence_parallel=facts.sequence_parallel,
    )
    config = SimpleNamespace(
        cuda_graph_impl="local" if facts.cuda_graphs else "none",
        cpu_offloading=facts.cpu_offload_activations,
        cpu_offloading_activations=True,  # Megatron's default; alone it does nothing
        recompute_granularity=facts.recompute_granularity,
        recompute_modules=list(facts.recompute_modules) or None,
    )
    return eligibility.decide(facts.variant, layer, config)


def test_preflight_and_kernels_decide_alike():
    for surface, facts in itertools.product(SURFACES, grid()):
        ahead, there = lora.decide(surface, facts), in_kernels(surface, facts)
        assert (ahead.uses, ahead.reason) == (there.uses, there.reason), (surface, facts)


SP = {"tp": 2, "sequence_parallel": True}

PUBLISHED = [  # what Megatron-Bridge's documentation says of its re-gather
    ("linear_qkv", {}, "regather", None),
    ("linear_fc1", {}, "regather", None),
    ("linear_proj", {}, "base", "row-parallel"),
    ("linear_fc2", {}, "base", "row-parallel"),
    ("linear_q_up_proj", {}, "base", "not one of"),
    ("in_proj", {}, "base", "not one of"),
    ("linear_fc1", {"is_expert": True}, "base", "expert"),
    ("linear_qkv", {"tp": 1}, "base", "size 1"),
    ("linear_qkv", {"sequence_parallel": False}, "base", "sequence parallelism is off"),
    ("linear_qkv", {"cuda_graphs": True}, "base", "CUDA graphs"),
    ("linear_qkv", {"cpu_offload_activations": True}, "base", "offload"),
    ("linear_qkv", {"recompute_granularity": "full"}, "base", "full recompute"),
    (
        "linear_fc1",
        {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
        "base",
        "recompute of mlp",
    ),
    (
        "linear_qkv",
        {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
        "regather",
        None,
    ),
    (
        "linear_fc1",
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
        "regather",
        None,
    ),
]


@pytest.mark.parametrize("surface, changes, uses, reason", PUBLISHED)
def test_regather_as_published(surface, changes, uses, reason):
    found = lora.decide(surface, SequenceParallelFacts(**{"variant": "regather", **SP, **changes}))
    assert found.uses == uses
    assert (found.reason or "").find(reason or "") >= 0
    assert (found.reason is None) == (reason is None)


@pytest.mark.parametrize("surface", ["linear_qkv", "linear_fc1", "linear_proj", "linear_fc2"])
@pytest.mark.parametrize("granularity", [None, "full", "selective"])
def test_gather_free_takes_row_parallel_layers_and_recompute(surface, granularity):
    facts = SequenceParallelFacts(
        variant="gather-free",
        recompute_granularity=granularity,
        recompute_modules=("mlp",),
        **SP,
    )
    assert lora.decide(surface, facts) == lora.Decision("gather-free")


def test_base_never_falls_back():
    assert all(
        lora.decide(surface, facts) == lora.Decision("base")
        for surface, facts in itertools.product(SURFACES, grid())
        if facts.variant == "base"
    )


@pytest.mark.parametrize(
    "config",
    [{"enable_cuda_graph": True}, {"external_cuda_graph": True}, {"cuda_graph_impl": "local"}],
    ids=str,
)
def test_cuda_graphs_by_any_of_megatrons_names(config):
    assert eligibility.uses_cuda_graphs(SimpleNamespace(**config))


def test_no_cuda_graphs():
    assert not eligibility.uses_cuda_graphs(SimpleNamespace())
    assert not eligibility.uses_cuda_graphs(SimpleNamespace(cuda_graph_impl="none"))


def test_unknown_variant_names_the_known():
    with pytest.raises(ValueError, match="'re-gather'; known: base, regather, gather-free"):
        lora.decide("linear_qkv", SequenceParallelFacts(variant="re-gather"))
