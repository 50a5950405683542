"""The estimate as a whole: two runs added up by hand, verdicts, the JSON document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mtlaunch.preflight.memory import Estimate, RankEstimate, estimate
from mtlaunch.preflight.memory.total import verdict
from mtlaunch.preflight.plan import Plan
from mtlaunch.preflight.yaml_text import JobFileError

PlanOf = Callable[..., Plan]
MIB, GIB = 2**20, 2**30

GPT3_15B: dict[str, Any] = {
    "num-layers": 32,
    "hidden-size": 6144,
    "num-attention-heads": 48,
    "group-query-attention": True,
    "num-query-groups": 8,
    "padded-vocab-size": 256000,
    "vocab-size": 256000,
    "seq-length": 4096,
    "micro-batch-size": 4,
    "global-batch-size": 1152,
    "tensor-model-parallel-size": 8,
    "sequence-parallel": True,
    "use-distributed-optimizer": True,
    "squared-relu": True,
    "disable-bias-linear": True,
    "position-embedding-type": "rope",
    "untie-embeddings-and-output-weights": True,
    "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
    "bf16": True,
}

GPT3_7B: dict[str, Any] = {
    "num-layers": 32,
    "hidden-size": 4096,
    "num-attention-heads": 32,
    "group-query-attention": True,
    "num-query-groups": 8,
    "vocab-size": 131073,
    "padded-vocab-size": 131200,
    "seq-length": 8192,
    "max-position-embeddings": 8192,
    "micro-batch-size": 1,
    "global-batch-size": 8,
    "pipeline-model-parallel-size": 4,
    "num-layers-per-virtual-pipeline-stage": 1,
    "use-distributed-optimizer": True,
    "untie-embeddings-and-output-weights": True,
    "no-gradient-accumulation-fusion": True,
    "bf16": True,
}


def of(plan: Plan) -> Estimate:
    result = estimate(plan)
    assert result is not None
    return result


def mib(rank: RankEstimate, *names: str) -> int:
    return round(sum(rank.components.get(name, 0) for name in names) / MIB)


def test_gpt3_15b_on_256_h100(plan_of: PlanOf):
    """Measured by NVIDIA: 12654 MiB between steps, 26856 MiB at the peak.

    D = 32; N * (6 + 12/32) = 11881. U = 2*6144*16384/8 = 24 MiB. A layer keeps
    4U + q,k,v 32 + output 24 + fc1 and activation 192 + statistics 0.4 = 344.4 MiB.
    Placeholder gradients: 2 bytes * 6144 * (1024 + 768 + 3072 + 3072 + 32000) = 468.
    """
    rank = of(plan_of(GPT3_15B, gpus=8, nodes=32)).ranks[0]
    layer = 6144 * (1024 + 768 + 2 * 3072) + 2 * 2 * 6144
    assert rank.parameters == 32 * layer + 2 * 32000 * 6144 + 2 * 6144
    assert mib(rank, "weights", "gradients", "optimizer_state") == 11881
    assert mib(rank, "library_workspaces") == 96
    assert mib(rank, "global_memory_buffer") == 192
    assert mib(rank, "dummy_weight_gradients") == 468
    assert mib(rank, "attention_activations", "mlp_activations") == 11020
    assert mib(rank, "final_norm", "logits", "cross_entropy") == 48 + 1000 + 2000
    assert round(rank.steady_bytes / MIB) == 11881 + 96 + 192 + 468
    assert round(rank.peak_bytes / MIB) == 12637 + 11020 + 3048
    assert rank.steady_bytes == pytest.approx(12654 * MIB, rel=0.002)
    assert rank.peak_bytes == pytest.approx(26856 * MIB, rel=0.006)
    # Adam's two moments appear with the first step: 478 MiB measured
    assert round((rank.peak_bytes - rank.peak_first_step_bytes) / MIB) == 466


def test_gpt3_7b_in_four_interleaved_stages(plan_of: PlanOf):
    """The last stage, measured 23403 and 57716 MiB on GB200: 29 layers of 15.5 U + 1, U = 64.

    State 12 bytes a parameter at D = 2. Tail 2U + 8192*131200*(2 + 4).
    """
    rank = of(plan_of(GPT3_7B, gpus=8)).ranks[-1]
    assert mib(rank, "weights", "gradients", "optimizer_state") == 22282
    layers = ("attention_activations", "mlp_activations")
    assert mib(rank, *layers) == 29 * 993
    assert mib(rank, "final_norm", "logits", "cross_entropy") == 6278
    assert round(rank.peak_bytes / MIB) == 57453
    # between steps, 2U for each of the 8 chunks stay: 1024 MiB
    assert round(rank.steady_bytes / MIB) == 22282 + 96 + 1024


def test_every_rank_and_the_worst(plan_of: PlanOf):
    """Layers held: 2(p-r-1) + (v-1)G + 1 = 35, 33, 31, 29; an MLP keeps 2 + 8 + 1/2 U of 64 MiB.

    The first is the worst, until the loss of the last weighs 10.5 layers instead of 6.3.
    """
    many = {**GPT3_7B, "global-batch-size": 256}
    result = of(plan_of(many, gpus=8))
    assert [rank.pipeline_rank for rank in result.ranks] == [0, 1, 2, 3]
    assert [mib(rank, "mlp_activations") for rank in result.ranks] == [
        672 * layers for layers in (35, 33, 31, 29)
    ]
    assert result.worst_pipeline_rank == 0
    fused = {**many, "cross-entropy-loss-fusion": True}
    assert of(plan_of(fused, gpus=8)).worst_pipeline_rank == 3


def test_components_add_up(plan_of: PlanOf):
    for extra in (
        {},
        {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
        {"grad-reduce-in-bf16": True},
        {"transformer-impl": "local"},
    ):
        for rank in of(plan_of({**GPT3_7B, **extra}, gpus=8)).ranks:
            assert sum(rank.components.values()) == rank.device_bytes
            assert rank.peak_low_bytes < rank.peak_bytes < rank.peak_high_bytes
            assert rank.device_low_bytes < rank.device_bytes < rank.device_high_bytes
            assert rank.steady_bytes <= rank.peak_first_step_bytes <= rank.peak_bytes


LLAMA = {"bf16": True, "micro-batch-size": 1, "global-batch-size": 8, "seq-length": 4096}


def test_the_document(plan_of: PlanOf):
    document = of(plan_of(LLAMA, gpus=8, model="llama2-7b")).to_json()
    assert list(document) == [
        "schema",
        "gpu",
        "world_size",
        "parallel",
        "ranks",
        "worst_pipeline_rank",
        "fits",
        "assumptions",
        "not_modelled",
    ]
    assert document["schema"] == "mtlaunch.estimate/1"
    assert document["gpu"]["name"] == "H100-80GB"
    assert list(document["gpu"]) == ["name", "capacity_bytes"]
    assert list(document["parallel"]) == ["tp", "pp", "vpp", "cp", "ep", "etp", "dp", "edp"]
    [rank] = document["ranks"]
    assert list(rank) == [
        "pipeline_rank",
        "parameters",
        "steady_bytes",
        "peak_first_step_bytes",
        "peak_bytes",
        "peak_low_bytes",
        "peak_high_bytes",
        "device_bytes",
        "device_low_bytes",
        "device_high_bytes",
        "components",
    ]
    assert all(isinstance(size, int) for size in rank["components"].values())


def test_without_a_named_gpu(plan_of: PlanOf):
    result = of(plan_of(LLAMA, gpus=8, gpu=None, model="llama2-7b"))
    assert result.to_json()["gpu"] is None and result.fits == "unknown"
    unknown = of(plan_of(LLAMA, gpus=8, gpu="X900", model="llama2-7b"))
    assert unknown.to_json()["gpu"] == {"name": "X900", "capacity_bytes": None}
    assert unknown.fits == "unknown"


def test_no_shape_no_estimate(plan_of: PlanOf):
    assert estimate(plan_of({"bf16": True})) is None


def test_a_micro_batch_of_nothing_is_refused(plan_of: PlanOf):
    with pytest.raises(JobFileError, match="micro-batch-size: expected at least 1, got 0"):
        plan_of({**LLAMA, "micro-batch-size": 0}, model="llama2-7b")


@pytest.mark.parametrize(("over", "wanted"), [((0, 0), "yes"), ((0, 1), "tight"), ((1, 1), "no")])
def test_the_bounds_of_the_verdict(plan_of: PlanOf, over: tuple[int, int], wanted: str):
    """One byte over the card is over it, equal is not."""
    rank = of(plan_of(LLAMA, gpus=8, model="llama2-7b")).ranks[0]
    low, high = over
    at = replace(rank, device_low_bytes=80 + low, device_high_bytes=80 + high)
    assert verdict([replace(at, device_low_bytes=0, device_high_bytes=0), at], 80, False) == wanted
    assert verdict([at], 80, True) == "unknown"
    assert verdict([at], None, False) == "unknown"


def test_verdicts_of_real_jobs(plan_of: PlanOf):
    def fits(gpu: str, **args: Any) -> str:
        options = {**LLAMA, "use-distributed-optimizer": True}
        options |= {name.replace("_", "-"): value for name, value in args.items()}
        return of(plan_of(options, gpus=8, gpu=gpu, model="llama2-7b")).fits

    assert fits("H100-80GB") == "yes"
    assert fits("H100-80GB", seq_length=6144) == "tight"
    assert fits("A100-40GB", seq_length=64) == "no"  # model state alone is 47 GiB


@pytest.mark.parametrize(
    "extra",
    [
        {"fp8-format": "hybrid"},
        {"use-megatron-fsdp": True},
        {"cuda-graph-impl": "transformer_engine"},
        {"fine-grained-activation-offloading": True, "offload-modules": ["core_attn"]},
        {"optimizer-cpu-offload": True},
        {"mtp-num-layers": 1},
        {"optimizer": "muon"},
        {"tp-comm-overlap": True},
        {"global-batch-size": 7},
    ],
    ids=str,
)
def test_what_is_not_modelled_is_named_and_decides_nothing(plan_of: PlanOf, extra: dict[str, Any]):
    options = {**LLAMA, "seq-length": 131072, **extra}
    result = of(plan_of(options, gpus=8, gpu="A100-40GB", model="llama2-7b"))
    assert result.not_modelled and result.fits == "unknown"
    rank = result.ranks[0]
    assert rank.peak_low_bytes < 0.6 * rank.peak_bytes
    assert rank.peak_high_bytes > 1.4 * rank.peak_bytes


def test_a_layout_that_megatron_refuses_still_has_numbers(plan_of: PlanOf):
    options = {**LLAMA, "pipeline-model-parallel-size": 5}
    result = of(plan_of(options, gpus=5, model="llama2-7b"))
    assert result.fits == "unknown" and len(result.ranks) == 5
    whole = of(plan_of(LLAMA, gpus=1, model="llama2-7b")).ranks[0].parameters
    assert sum(rank.parameters for rank in result.ranks) == whole


def test_ranks_without_a_gpu_hold_nothing_outside(plan_of: PlanOf):
    plan = plan_of(LLAMA, gpu=None, model="llama2-7b")
    rank = of(replace(plan, gpus_per_node=None)).ranks[0]
    assert rank.device_bytes == rank.peak_bytes
    assert not {"cuda_context", "nccl", "library_workspaces"} & set(rank.components)
