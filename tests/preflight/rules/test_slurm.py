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


@pytest.mark.parametrize(
    "launcher, slurm, id, hint",
    [
        ("srun", {"nodes": 2, "ntasks": 16}, None, ""),
        ("srun", {"nodes": 2, "ntasks": 4}, "SLM001", "use ntasks: 16, or leave it out"),
        ("srun", {"nodes": 2, "ntasks": 2}, "SLM001", "launcher: torchrun"),
        ("srun", {"ntasks": 16}, "SLM001", "use nodes: 2, and leave ntasks out"),
        ("torchrun", {"nodes": 2, "ntasks": 2}, None, ""),
        ("torchrun", {"nodes": 2, "ntasks": 16}, "SLM002", "use ntasks: 2, or leave it out"),
    ],
)
def test_all_tasks(
    plan: Any, found: Any, launcher: str, slurm: dict[str, Any], id: str | None, hint: str
) -> None:
    findings = found(plan(slurm={"gpus_per_node": 8, **slurm}, launcher=launcher), "SLM")
    assert [finding.id for finding in findings] == ([id] if id else [])
    for finding in findings:
        assert finding.option == "slurm.ntasks" and finding.where.line > 0
        assert hint in finding.hint


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


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"])
@pytest.mark.parametrize("where", ["env", "cluster"])
def test_a_rank_variable_for_all_ranks(plan: Any, found: Any, name: str, where: str) -> None:
    job = {"env": {name: "8"}} if where == "env" else {"cluster": {"env": {name: "8"}}}
    [finding] = found(plan(**job), "SLM")
    assert (finding.id, finding.option) == ("SLM004", f"env.{name}")
    assert finding.message == f"{name}=8 for every rank, but each rank has its own"


def test_the_rendezvous_may_be_set(plan: Any, found: Any) -> None:
    assert found(plan(env={"MASTER_ADDR": "node1", "MASTER_PORT": "1"}), "SLM") == []


@pytest.mark.parametrize(
    "slurm, facts, expected",
    [
        ({"time": "00:10:00"}, {"checkpoint_seconds": 540}, ["SLM005"]),
        ({"time": "00:10:00"}, {"checkpoint_seconds": 539}, []),
        ({"time": "10"}, {"checkpoint_seconds": 600}, ["SLM005"]),
        ({}, {"checkpoint_seconds": 6000}, []),
        ({"time": "1-00"}, {"checkpoint_seconds": 6000}, []),
        ({"time": "5", "signal": "B:USR1@300"}, {}, ["SLM005"]),
        ({"time": "5", "signal": "B:USR1@299"}, {}, []),
        ({"time": "1", "signal": "TERM"}, {}, ["SLM005"]),  # sbatch's default: 60 s
        ({"time": "5", "signal": "B:USR1@120"}, {"checkpoint_seconds": 6000}, []),
    ],
)
def test_a_warning_before_the_start(
    plan: Any, found: Any, slurm: dict[str, Any], facts: dict[str, Any], expected: list[str]
) -> None:
    findings = found(plan(slurm={"gpus_per_node": 8, **slurm}, facts=facts), "SLM")
    assert [finding.id for finding in findings] == expected


@pytest.mark.parametrize("time", ["24h", "1:2:3:4", "4 hours", "-1"])
def test_a_time_that_sbatch_does_not_read(plan: Any, found: Any, time: str) -> None:
    [finding] = found(plan(slurm={"gpus_per_node": 8, "time": time}), "SLM")
    assert (finding.id, finding.option) == ("SLM006", "slurm.time")


@pytest.mark.parametrize("time", ["90", "4:00:00", "1-12", "UNLIMITED", "infinite"])
def test_times_that_sbatch_reads(plan: Any, found: Any, time: str) -> None:
    assert found(plan(slurm={"gpus_per_node": 8, "time": time}), "SLM") == []
