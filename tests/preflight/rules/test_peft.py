"""PEF: a LoRA variant that cannot have an effect."""

from __future__ import annotations

from typing import Any

import pytest

SP = {"num-layers": 8, "tensor-model-parallel-size": 2, "sequence-parallel": True}
FULL = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}


@pytest.mark.parametrize(
    "variant, args, reason",
    [
        ("regather", {**SP, "sequence-parallel": False}, "sequence parallelism is off"),
        ("gather-free", {**SP, "sequence-parallel": False}, "sequence parallelism is off"),
        ("regather", {"num-layers": 8}, "tensor-parallel size 1"),
        ("regather", {**SP, "cuda-graph-impl": "local"}, "CUDA graphs are on"),
        ("gather-free", {**SP, "cuda-graph-impl": "local"}, "CUDA graphs are on"),
        ("regather", {**SP, "cpu-offloading-num-layers": 2}, "CPU offload of activations"),
        ("regather", {**SP, **FULL}, "full recompute"),
        ("regather", SP, None),
        ("gather-free", SP, None),
        ("gather-free", {**SP, **FULL}, None),
        ("base", {"num-layers": 8}, None),
        (
            "regather",
            {**SP, "recompute-granularity": "selective", "recompute-modules": ["mlp"]},
            None,  # linear_qkv still uses it
        ),
    ],
)
def test_variant(
    plan: Any, found: Any, variant: str, args: dict[str, Any], reason: str | None
) -> None:
    findings = found(plan(args, lora={"sequence_parallel": variant}), "PEF")
    assert [f.level for f in findings] == ["warning"] * (reason is not None)
    if reason is not None:
        assert reason in findings[0].message
        assert "row-parallel" not in findings[0].message
        assert "lora.sequence_parallel: base" in findings[0].hint


def test_row_parallel_targets_only(plan: Any, found: Any) -> None:
    lora = {"sequence_parallel": "regather", "target_modules": ["linear_proj", "linear_fc2"]}
    [finding] = found(plan(SP, lora=lora), "PEF")
    assert "row-parallel" in finding.message
    assert finding.hint.startswith("use lora.sequence_parallel: gather-free")
    lora["sequence_parallel"] = "gather-free"
    assert found(plan(SP, lora=lora), "PEF") == []


def test_hints_pass(plan: Any, found: Any) -> None:
    off = {**SP, "sequence-parallel": False}
    [finding] = found(plan(off, lora={"sequence_parallel": "regather"}), "PEF")
    assert finding.hint.startswith("add --sequence-parallel, or")
    # switching it on is no fix where something else stands against it too
    [finding] = found(plan({**off, **FULL}, lora={"sequence_parallel": "regather"}), "PEF")
    assert finding.hint == "set lora.sequence_parallel: base"


def test_silent(plan: Any, found: Any) -> None:
    assert found(plan({"num-layers": 8}), "PEF") == []
    lora = {"sequence_parallel": "regather", "target_modules": ["*.linear_*"]}
    assert found(plan({"num-layers": 8}, lora=lora), "PEF") == []


@pytest.mark.parametrize(
    "name, expected",
    [
        ("linear_qvk", "did you mean 'linear_qkv'?"),
        ("decoder.layers.0.mlp.linear_fc11", "did you mean 'linear_fc1'?"),
        ("linear_qkv", None),
        ("in_proj", None),
        ("*.linear_qvk", None),
        ("my_own_projection_layer", None),
    ],
)
def test_a_misspelt_target(plan: Any, found: Any, name: str, expected: str | None) -> None:
    findings = found(plan(lora={"target_modules": [name]}), "PEF")
    assert [finding.hint for finding in findings] == ([] if expected is None else [expected])
    assert all(finding.id == "PEF002" and finding.level == "error" for finding in findings)
