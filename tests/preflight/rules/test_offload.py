"""OFF: offloading with a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

PP2 = {"num-layers": 8, "pipeline-model-parallel-size": 2}
BRIDGE = {"framework": "megatron-bridge"}

FIRING = {
    "number of layers": ({**PP2, "cpu-offloading-num-layers": 1}, {}),
    "number of layers, underscores": ({**PP2, "cpu_offloading_num_layers": 4}, {}),
    "bridge field": ({**PP2, "model.cpu_offloading": True}, BRIDGE),
    "bridge field with layers": (
        {**PP2, "model.cpu_offloading": True, "model.cpu_offloading_num_layers": 2},
        BRIDGE,
    ),
    "bare field": ({**PP2, "cpu_offloading": True}, BRIDGE),
}


@pytest.mark.parametrize("args, job", FIRING.values(), ids=FIRING)
def test_firing(plan: Any, found: Any, args: dict[str, Any], job: dict[str, Any]) -> None:
    [finding] = found(plan(args, **job), "OFF")
    assert (finding.id, finding.level) == ("OFF001", "error")
    assert finding.where.line > 0
    assert found(plan({**args, "pipeline-model-parallel-size": 1}, **job), "OFF") == []


SILENT = {
    "no layers": ({**PP2, "cpu-offloading-num-layers": 0}, {}),
    "no pipeline": ({"num-layers": 8, "cpu-offloading-num-layers": 4}, {}),
    "optimizer": (
        {**PP2, "optimizer-cpu-offload": True, "use-precision-aware-optimizer": True},
        {},
    ),
    "fine-grained activations": (
        {**PP2, "fine-grained-activation-offloading": True, "offload-modules": ["core_attn"]},
        {},
    ),
    "recompute": ({**PP2, "recompute-granularity": "selective"}, {}),
    "bridge: switched off": ({**PP2, "model.cpu_offloading": False}, BRIDGE),
    "bridge: a number alone": ({**PP2, "model.cpu_offloading_num_layers": 2}, BRIDGE),
}


@pytest.mark.parametrize("args, job", SILENT.values(), ids=SILENT)
def test_silent(plan: Any, found: Any, args: dict[str, Any], job: dict[str, Any]) -> None:
    assert found(plan(args, **job), "OFF") == []


def test_message(plan: Any, found: Any) -> None:
    [finding] = found(plan({**PP2, "cpu-offloading-num-layers": 4}), "OFF")
    assert finding.option == "cpu-offloading-num-layers"
    assert finding.message == (
        "--cpu-offloading-num-layers 4 offloads layers to the CPU, which works with PP 1 only, and "
        "--pipeline-model-parallel-size is 2"
    )
    assert finding.hint == (
        "use --pipeline-model-parallel-size 1, or drop --cpu-offloading-num-layers; with a "
        "pipeline these work: --optimizer-cpu-offload (with --use-precision-aware-optimizer), "
        "--recompute-granularity selective, --fine-grained-activation-offloading"
    )


def test_message_for_bridge(plan: Any, found: Any) -> None:
    [finding] = found(plan({**PP2, "model.cpu_offloading": True}, **BRIDGE), "OFF")
    assert finding.message.startswith("model.cpu_offloading=true offloads layers")
