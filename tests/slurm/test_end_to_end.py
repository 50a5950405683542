"""`mtlaunch submit` against the real Slurm: queue, run, kill, cancel, refuse, report."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[2]
REFUSED = sorted((ROOT / "examples" / "refused").glob("*.yaml"))

SCRIPT = """\
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
time.sleep(float(sys.argv[1]))
"""


@dataclass
class Shell:
    """A user's shell with mtlaunch on the cluster, and a folder of its own."""

    cluster: SlurmCluster
    folder: Path

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def environment(self, **more: str) -> dict[str, str]:
        own = {
            "XDG_STATE_HOME": str(self.folder / "state"),
            "MTLAUNCH_RUNS": str(self.runs),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        return {**self.cluster.env, **own, **more}

    def mtlaunch(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mtlaunch.launcher", *words],
            env=self.environment(**more),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def job(self, seconds: float = 0.2, **slurm: Any) -> str:
        (self.folder / "train.py").write_text(SCRIPT)
        content = {
            "name": "probe",
            "slurm": {"nodes": 2, "ntasks_per_node": 2, "time": 5, **slurm},
            "python": sys.executable,
            "entrypoint": "train.py",
            "extra_args": [str(seconds)],
        }
        (self.folder / "job.yaml").write_text(json.dumps(content))
        return "job.yaml"

    def run_dir(self, job_id: str) -> Path:
        return next(self.runs.glob(f"*/{job_id}")).resolve()

    def report(self, job_id: str) -> dict[str, Any]:
        done = self.mtlaunch("report", job_id, "--format", "json")
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def record_of(self, job_id: str, rank: int, timeout_s: float = 30) -> dict[str, Any]:
        """The report's row of a rank, once it has started."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            rows = self.report(job_id)["ranks"]
            if len(rows) > rank and rows[rank]["node"]:
                row: dict[str, Any] = rows[rank]
                return row
            time.sleep(0.2)
        raise AssertionError(f"rank {rank} of job {job_id} never started")


@pytest.fixture
def shell(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Shell]:
    yield Shell(slurm, tmp_path)
    slurm.clear()


def test_a_job_over_two_nodes_is_queued_run_and_reported(shell: Shell) -> None:
    done = shell.mtlaunch("submit", shell.job(), "--wait")
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.strip()
    assert job_id.isdigit(), "only the job id goes to stdout"
    assert "executor: slurm, because scontrol ping answers" in done.stderr
    report = json.loads((shell.run_dir(job_id) / "report.json").read_text())
    assert report["job"]["state"] == "COMPLETED"
    assert [(row["rank"], row["node"], row["exit_code"]) for row in report["ranks"]] == [
        (0, "n1", 0),
        (1, "n1", 0),
        (2, "n2", 0),
        (3, "n2", 0),
    ]
    assert all(row["complete"] and row["peak_host_bytes"] > 2**20 for row in report["ranks"])
    assert report["diagnosis"] == []


def test_slurm_gets_the_rendered_script_byte_for_byte(shell: Shell) -> None:
    job_id = shell.mtlaunch("submit", shell.job(seconds=20)).stdout.strip()
    kept = shell.cluster.run("scontrol", "write", "batch_script", job_id, "-").stdout
    assert kept.rstrip("\n") == (shell.run_dir(job_id) / "job.sbatch").read_text().rstrip("\n")


def test_the_submit_shell_changes_neither_options_nor_environment(shell: Shell) -> None:
    shell.job()
    (shell.folder / "train.py").write_text(
        "import os; print('ALGO', os.environ.get('NCCL_ALGO'), os.environ['MASTER_PORT'])"
    )
    inherited = {"NCCL_ALGO": "Tree", "SBATCH_TIMELIMIT": "7", "SLURM_NTASKS_PER_NODE": "1"}
    done = shell.mtlaunch("submit", "job.yaml", "--wait", MASTER_PORT="1", **inherited)
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.strip()
    assert len(shell.report(job_id)["ranks"]) == 4
    log = (shell.run_dir(job_id) / "logs" / f"{job_id}.log").read_text()
    assert "ALGO None" in log and "ALGO None 1\n" not in log
    assert shell.cluster.job(job_id)[0]["TimeLimit"] == "00:05:00"


def test_a_rank_killed_with_sigkill_is_in_the_report(shell: Shell) -> None:
    job_id = shell.mtlaunch("submit", shell.job(seconds=60)).stdout.strip()
    shell.record_of(job_id, 3)
    run_dir = shell.run_dir(job_id)
    pid = _pid_of(run_dir, rank=2)
    os.kill(pid, signal.SIGKILL)
    assert shell.cluster.wait_job(job_id, 60) == "FAILED"
    report = shell.report(job_id)
    row = report["ranks"][2]
    assert (row["node"], row["signal"], row["ended"]) == ("n2", 9, "killed by SIGKILL")
    assert row["peak_host_bytes"] > 2**20
    assert report["first_failure"]["rank"] == 2
    assert report["diagnosis"][0]["label"] == "task_failure"
    assert report["summary"]["recorded"] == 4, "the other ranks are there as well"


def test_wait_says_failed_with_the_rank_that_failed_first(shell: Shell) -> None:
    shell.job()
    (shell.folder / "train.py").write_text(
        "import os, sys, time\n"
        "time.sleep(1 if os.environ['RANK'] == '1' else 30)\n"
        "raise RuntimeError('boom') if os.environ['RANK'] == '1' else sys.exit(0)\n"
    )
    done = shell.mtlaunch("submit", "job.yaml", "--wait")
    assert done.returncode == 5, done.stderr
    assert "rank 1 on n1 exited with 1: RuntimeError: boom" in done.stderr
    report = shell.report(done.stdout.strip())
    assert report["job"]["state"] == "FAILED"
    assert report["first_failure"]["rank"] == 1


def test_cancel_by_id_ends_the_job_and_its_processes(shell: Shell) -> None:
    job_id = shell.mtlaunch("submit", shell.job(seconds=120)).stdout.strip()
    shell.record_of(job_id, 3)
    assert shell.mtlaunch("cancel", job_id).returncode == 0
    assert shell.cluster.wait_job(job_id, 60) == "CANCELLED"
    assert shell.mtlaunch("status", job_id).stdout.split()[1] == "CANCELLED"
    report = shell.report(job_id)
    assert report["job"]["state"] == "CANCELLED"
    assert {row["signal"] for row in report["ranks"]} == {signal.SIGTERM}
    assert shell.cluster.job_processes(job_id) == {}


def test_what_sbatch_refuses_is_exit_4_and_leaves_nothing_behind(shell: Shell) -> None:
    done = shell.mtlaunch("submit", shell.job(partition="nowhere"))
    assert done.returncode == 4
    assert "invalid partition" in done.stderr.lower()
    assert done.stdout == ""
    assert not shell.runs.exists()
    assert shell.cluster.squeue() == []


def test_a_job_is_followed_on_the_cluster_that_it_names(shell: Shell) -> None:
    shell.job(seconds=60, clusters=shell.cluster.name)
    job_id = shell.mtlaunch("submit", "job.yaml").stdout.strip()
    assert job_id.isdigit()
    submission = json.loads((shell.run_dir(job_id) / "submission.json").read_text())
    assert submission["cluster"] == shell.cluster.name
    shell.record_of(job_id, 3)
    assert shell.mtlaunch("status", job_id).stdout.split()[1] == "RUNNING"
    assert shell.mtlaunch("cancel", job_id).returncode == 0
    assert shell.mtlaunch("logs", "-f", job_id).returncode == 0
    assert shell.mtlaunch("status", job_id).stdout.split()[1] == "CANCELLED"


def test_a_job_that_slurm_does_not_know_has_ended_as_its_directory_says(shell: Shell) -> None:
    done = shell.mtlaunch("submit", shell.job(), "--wait")
    run_dir = shell.run_dir(done.stdout.strip())
    for name in ("submission.json", "status.json"):
        content = json.loads((run_dir / name).read_text())
        (run_dir / name).write_text(json.dumps({**content, "job_id": "99999"}))
    assert shell.mtlaunch("status", str(run_dir)).stdout.split()[:2] == ["99999", "COMPLETED"]
    assert shell.mtlaunch("logs", "-f", str(run_dir)).returncode == 0


def test_a_job_that_lost_its_node_and_waits_again_is_not_over(shell: Shell) -> None:
    job_id = shell.mtlaunch("submit", shell.job(seconds=60, requeue=True)).stdout.strip()
    shell.record_of(job_id, 3)
    shell.cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    deadline = time.monotonic() + 60
    seen: list[str] = []
    while "PENDING" not in seen and time.monotonic() < deadline:
        seen.append(shell.mtlaunch("status", job_id).stdout.split()[1])
    assert seen[-1] == "PENDING", seen
    assert set(seen) <= {"RUNNING", "COMPLETING", "PENDING"}


@pytest.mark.parametrize("file", REFUSED, ids=lambda path: path.stem)
def test_a_refused_job_leaves_nothing_behind(shell: Shell, file: Path) -> None:
    done = shell.mtlaunch("submit", str(file))
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert re.search(r"\berror [A-Z]{3}\d{3} ", done.stderr)
    assert shell.cluster.squeue() == []
    assert not shell.runs.exists()


def test_torchrun_launcher_starts_one_agent_a_node(shell: Shell) -> None:
    pytest.importorskip("torch")
    job = shell.job(ntasks_per_node=None, gpus_per_node=2)
    done = shell.mtlaunch("submit", job, "--wait", "--set", "launcher=torchrun")
    assert done.returncode == 0, done.stderr
    rows = shell.report(done.stdout.strip())["ranks"]
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    assert sorted(row["node"] for row in rows) == ["n1", "n1", "n2", "n2"]
    assert all(row["exit_code"] == 0 and row["complete"] for row in rows)


@pytest.mark.train
def test_the_main_example_trains_on_two_nodes_with_lora_attached(shell: Shell) -> None:
    pytest.importorskip("megatron.core")
    job = str(ROOT / "examples" / "tiny-lora" / "job.yaml")
    layout = ("--set", "slurm.nodes=2", "--set", "slurm.ntasks_per_node=1")
    done = shell.mtlaunch("submit", job, "--wait", *layout, "--set", f"python={sys.executable}")
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.strip()
    report = shell.report(job_id)
    assert [row["node"] for row in report["ranks"]] == ["n1", "n2"]
    assert all(row["peak_host_bytes"] > 100 * 2**20 for row in report["ranks"])
    for row in report["ranks"]:
        lora = row["modules"]["lora"]
        assert lora["variant"] == "regather"
        assert (lora["attached"], lora["variant_modules"], lora["fallback_modules"]) == (8, 4, 4)
    assert report["ranks"][0]["versions"]["torch"]
    log = (shell.run_dir(job_id) / "logs" / f"{job_id}.log").read_text()
    losses = [float(text) for text in re.findall(r"lm loss: (\S+)", log)]
    assert len(losses) >= 4 and losses[-1] < losses[0] - 0.5, losses
    assert "[mtlaunch] LoRA" in log


def _pid_of(run_dir: Path, rank: int) -> int:
    from mtlaunch.launcher.runner.report import read_records

    records, _ = read_records(run_dir, 0)
    return next(int(record.process["pid"]) for record in records if record.rank == rank)
