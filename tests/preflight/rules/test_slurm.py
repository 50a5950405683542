"""SLM: tasks, launcher, GPU names."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    "launcher, gpus, tasks, expected",
    [
        ("srun", 8, 8, []),
        ("srun", 8, None, []),
        ("srun", 8, 1, ["SLM001"]),
        ("srun", 8, 4, ["SLM001"]),
        ("srun", 4, 8, ["SLM001"]),
        ("srun", None, 4, []),
        ("torchrun", 8, 1, []),
        ("torchrun", 8, None, []),
        ("torchrun", 8, 8, ["SLM002"]),
    ],
)
def test_tasks(
    plan: Any, found: Any, launcher: str, gpus: int | None, tasks: int | None, expected: list[str]
) -> None:
    slurm = {"nodes": 2, "gpus_per_node": gpus, "ntasks_per_node": tasks}
    findings = found(plan(slurm=slurm, launcher=launcher), "SLM")
    assert [finding.id for finding in findings] == expected
    for finding in findings:
        assert finding.where.line > 0 and finding.level == "error"


def test_messages(plan: Any, found: Any) -> None:
    slurm = {"gpus_per_node": 8, "ntasks_per_node": 1}
    [finding] = found(plan(slurm=slurm), "SLM")
    assert finding.message == "1 task a node for 8 GPUs: launcher srun runs one task a GPU"
    assert "launcher: torchrun" in finding.hint
    slurm = {"gpus_per_node": 8, "ntasks_per_node": 8}
    [finding] = found(plan(slurm=slurm, launcher="torchrun"), "SLM")
    assert finding.message == (
        "8 tasks a node would start torchrun 8 times there; it must run once"
    )


@pytest.mark.parametrize("gpu", ["H100-80GB", "h100", "NVIDIA H200", "B200"])
def test_known_gpus(plan: Any, found: Any, gpu: str) -> None:
    assert found(plan(cluster={"gpu": gpu}), "SLM") == []


def test_unknown_gpu(plan: Any, found: Any) -> None:
    [finding] = found(plan(cluster={"gpu": "H100-81GB"}), "SLM")
    assert (finding.id, finding.level) == ("SLM003", "warning")
    assert "unknown GPU 'H100-81GB'" in finding.message
    assert "H100-80GB" in finding.hint
    assert found(plan(), "SLM") == []
