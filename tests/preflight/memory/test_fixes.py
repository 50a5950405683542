"""The refusal and its hints: what is proposed fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtlaunch.preflight.memory.fixes import combined_fix, single_fixes
from mtlaunch.preflight.plan import Plan
from mtlaunch.preflight.rule import Finding, run_rules

PlanOf = Callable[..., Plan]
LLAMA = {
    "bf16": True,
    "micro-batch-size": 1,
    "global-batch-size": 64,
    "seq-length": 4096,
    "max-position-embeddings": 4096,
}


def memory_findings(plan: Plan) -> list[Finding]:
    return list(run_rules(plan, select=["MEM"]))


def test_model_state_without_the_distributed_optimizer(plan_of: PlanOf):
    plan = plan_of(LLAMA, gpus=8, model="llama2-7b")
    [finding] = memory_findings(plan)
    assert finding.id == "MEM001" and finding.option == "cluster.gpu"
    assert "pipeline rank 0" in finding.message and "H100-80GB has 79.1 GiB" in finding.message
    assert "largest component: optimizer state" in finding.message
    assert "model state" in finding.message
    assert finding.hint.startswith("use --use-distributed-optimizer (about ")


def test_a_hint_applied_is_silent(plan_of: PlanOf):
    plan = plan_of(LLAMA, gpus=8, model="llama2-7b")
    for fix in single_fixes(plan):
        if fix.estimate.fits == "yes":
            assert memory_findings(fix.plan) == []


def test_unfused_scores_are_named(plan_of: PlanOf):
    """32 layers of 32 heads at 4096^2: 5 bytes each with dropout, 80 GiB."""
    args: dict[str, Any] = {
        **LLAMA,
        "global-batch-size": 1,
        "attention-dropout": 0.1,
        "transformer-impl": "local",
    }
    [finding] = memory_findings(plan_of(args, gpu="A100-80GB", model="llama2-7b"))
    assert "attention scores (unfused attention), 80.0 GiB" in finding.message
    assert "no change" in finding.hint or "attention-backend flash" in finding.hint


def test_activations_ask_for_a_smaller_micro_batch_first(plan_of: PlanOf):
    args = {**LLAMA, "micro-batch-size": 4, "use-distributed-optimizer": True}
    [finding] = memory_findings(plan_of(args, gpus=8, gpu="A100-80GB", model="llama2-7b"))
    assert "MLP activations" in finding.message
    assert finding.hint.startswith("use --micro-batch-size 1 ")


def test_several_changes_together(plan_of: PlanOf):
    args = {**LLAMA, "tensor-model-parallel-size": 8, "sequence-parallel": True}
    args |= {"seq-length": 32768, "max-position-embeddings": 32768}
    plan = plan_of(args, nodes=8, gpus=8, gpu="A100-40GB", model="llama3-70b")
    [finding] = memory_findings(plan)
    combined = combined_fix(plan)
    assert combined is not None and combined.estimate.fits in ("yes", "tight")
    assert finding.hint.startswith("no single change is enough; use ")
    assert combined.text in finding.hint
    assert finding.hint.count("recompute-granularity") <= 1


def test_sequence_parallelism_comes_with_tensor_parallelism(plan_of: PlanOf):
    args = {**LLAMA, "seq-length": 32768, "max-position-embeddings": 32768}
    plan = plan_of(args, gpus=8, gpu="A100-40GB", model="llama2-7b")
    [fix] = [fix for fix in single_fixes(plan) if "tensor" in fix.text]
    assert fix.text == "--tensor-model-parallel-size 8 --sequence-parallel"


def test_no_way_out(plan_of: PlanOf):
    [finding] = memory_findings(plan_of(LLAMA, gpus=1, gpu="A100-40GB", model="llama3-70b"))
    assert "no change" in finding.hint


def test_silent_where_something_is_not_modelled(plan_of: PlanOf):
    args = {**LLAMA, "fp8-format": "hybrid"}
    assert memory_findings(plan_of(args, gpus=1, gpu="A100-40GB", model="llama3-70b")) == []


def test_tight_is_a_warning_and_blames_fragmentation_first(plan_of: PlanOf):
    args = {**LLAMA, "use-distributed-optimizer": True, "seq-length": 5120}
    args |= {"global-batch-size": 8, "max-position-embeddings": 5120}
    job = {"gpus": 8, "model": "llama2-7b", "env": {"PYTORCH_CUDA_ALLOC_CONF": ""}}
    [finding] = memory_findings(plan_of(args, **job))
    assert finding.id == "MEM002" and finding.level == "warning"
    assert "expandable_segments:True" in finding.hint
    assert memory_findings(plan_of(args, gpus=8, model="llama2-7b")) == []
