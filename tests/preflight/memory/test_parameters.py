"""Parameter counts: against hand arithmetic, and against models that megatron-core builds."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtlaunch.preflight.memory import estimate
from mtlaunch.preflight.plan import Plan

PlanOf = Callable[..., Plan]

SCRIPT = Path(__file__).with_name("megatron_parameters.py")

BASE: dict[str, Any] = {
    "num-layers": 4,
    "hidden-size": 64,
    "num-attention-heads": 8,
    "seq-length": 32,
    "micro-batch-size": 1,
    "max-position-embeddings": 32,
    "padded-vocab-size": 512,
    "vocab-size": 512,
    "bf16": True,
}
LLAMA: dict[str, Any] = {
    "swiglu": True,
    "ffn-hidden-size": 192,
    "normalization": "RMSNorm",
    "disable-bias-linear": True,
    "position-embedding-type": "rope",
    "untie-embeddings-and-output-weights": True,
    "group-query-attention": True,
    "num-query-groups": 4,
}
TP, PP = "tensor-model-parallel-size", "pipeline-model-parallel-size"
CASES: dict[str, dict[str, Any]] = {
    "gpt tied": {},
    "gpt tied tp2": {TP: 2, "sequence-parallel": True},
    "gpt tied pp2": {PP: 2},
    "gpt tied tp2 pp2": {TP: 2, "sequence-parallel": True, PP: 2},
    "gpt untied pp4": {PP: 4, "untie-embeddings-and-output-weights": True},
    "gpt tied pp2 vpp2": {PP: 2, "num-virtual-stages-per-pipeline-rank": 2},
    "llama": LLAMA,
    "llama tp4": {**LLAMA, TP: 4, "sequence-parallel": True},
    "llama tp2 pp2 uneven": {
        **LLAMA,
        TP: 2,
        "sequence-parallel": True,
        PP: 2,
        "decoder-first-pipeline-num-layers": 1,
    },
    "llama pp2 layout": {
        **LLAMA,
        PP: 2,
        "pipeline-model-parallel-layout": "Et|tt|t|L",
    },
    "llama wide heads, qk norm": {**LLAMA, "kv-channels": 16, "qk-layernorm": True, TP: 2},
    "qk layernorm with bias": {"qk-layernorm": True},
    "qkv bias": {**LLAMA, "add-qkv-bias": True, TP: 2},
    "multi-query": {"group-query-attention": True, "num-query-groups": 1},
    "experts": {**LLAMA, "num-experts": 4, "moe-ffn-hidden-size": 96, "moe-router-topk": 2},
    "experts and a shared one": {
        **LLAMA,
        "num-experts": 4,
        "moe-ffn-hidden-size": 96,
        "moe-shared-expert-intermediate-size": 128,
        "moe-router-topk": 2,
    },
}


def by_hand() -> dict[str, int]:
    """GPT with 4 layers, h 64, f 256, V 512, 32 positions, biases, LayerNorm, tied."""
    attention = 128 + 64 * 192 + 192 + 64 * 64 + 64
    mlp = 128 + 64 * 256 + 256 + 256 * 64 + 64
    return {"gpt tied": 4 * (attention + mlp) + 512 * 64 + 32 * 64 + 128}


def counts_of(plan_of: PlanOf, extra: dict[str, Any]) -> list[int]:
    args = {**BASE, **extra}
    gpus = args.get(TP, 1) * args.get(PP, 1)
    result = estimate(plan_of(args, gpus=gpus))
    assert result is not None
    return [rank.parameters for rank in result.ranks]


def test_a_small_gpt_by_hand(plan_of: PlanOf):
    assert counts_of(plan_of, {}) == [by_hand()["gpt tied"]]


def test_a_tied_output_is_a_copy_on_another_stage(plan_of: PlanOf):
    whole, split = counts_of(plan_of, {}), counts_of(plan_of, {PP: 2})
    assert sum(split) == sum(whole) + 512 * 64


def test_published_sizes(plan_of: PlanOf):
    """Brown et al. table 2.1, the Llama papers and model cards, within what they round to."""
    for model, billions in {
        "gpt3-175b": 174.6,
        "llama2-7b": 6.74,
        "llama3-8b": 8.03,
        "llama3-70b": 70.55,
        "llama3.1-405b": 405.85,
        "qwen3-8b": 8.19,
    }.items():
        plan = plan_of({"seq-length": 2048, "micro-batch-size": 1, "bf16": True}, model=model)
        result = estimate(plan)
        assert result is not None
        assert result.ranks[0].parameters / 1e9 == pytest.approx(billions, rel=0.002), model


def megatron_case(plan_of: PlanOf, extra: dict[str, Any]) -> dict[str, Any]:
    """The same options as megatron-core's TransformerConfig and GPTModel take them."""
    args = {**BASE, **extra}
    config = {
        "num_layers": args["num-layers"],
        "hidden_size": args["hidden-size"],
        "num_attention_heads": args["num-attention-heads"],
        "num_query_groups": args.get("num-query-groups"),
        "kv_channels": args.get("kv-channels"),
        "ffn_hidden_size": args.get("ffn-hidden-size"),
        "gated_linear_unit": args.get("swiglu", False),
        "normalization": args.get("normalization", "LayerNorm"),
        "qk_layernorm": args.get("qk-layernorm", False),
        "add_bias_linear": not args.get("disable-bias-linear", False),
        "add_qkv_bias": args.get("add-qkv-bias", False),
        "num_layers_in_first_pipeline_stage": args.get("decoder-first-pipeline-num-layers"),
        "num_layers_in_last_pipeline_stage": args.get("decoder-last-pipeline-num-layers"),
        "pipeline_model_parallel_layout": args.get("pipeline-model-parallel-layout"),
    }
    if "num-experts" in args:
        config |= {
            "num_moe_experts": args["num-experts"],
            "moe_ffn_hidden_size": args["moe-ffn-hidden-size"],
            "moe_router_topk": args["moe-router-topk"],
            "moe_shared_expert_intermediate_size": args.get("moe-shared-expert-intermediate-size"),
            "moe_token_dispatcher_type": "alltoall",
        }
    plan = plan_of(args, gpus=args.get(TP, 1) * args.get(PP, 1))
    return {
        "tp": plan.tp,
        "pp": plan.pp,
        "vpp": plan.vpp,
        "ep": plan.ep,
        "etp": plan.etp,
        "config": config,
        "model": {
            "vocab_size": args["padded-vocab-size"],
            "max_sequence_length": args["max-position-embeddings"],
            "position_embedding_type": args.get("position-embedding-type", "learned_absolute"),
            "share_embeddings_and_output_weights": not args.get(
                "untie-embeddings-and-output-weights", False
            ),
        },
    }


@pytest.fixture(scope="module")
def built(plan_of: PlanOf) -> dict[str, list[int]]:
    for module in ("torch", "megatron.core"):
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            pytest.skip(f"{module} is not installed")
    run = subprocess.run(
        [sys.executable, str(SCRIPT)],
        input=json.dumps([megatron_case(plan_of, extra) for extra in CASES.values()]),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    line = next(line for line in run.stdout.splitlines() if line.startswith("counts "))
    return dict(zip(CASES, json.loads(line.removeprefix("counts ")), strict=True))


@pytest.mark.train
@pytest.mark.parametrize("case", CASES)
def test_as_many_as_megatron_core_builds(plan_of: PlanOf, case: str, built: dict[str, list[int]]):
    assert counts_of(plan_of, CASES[case]) == built[case]
