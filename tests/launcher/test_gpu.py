"""What only a GPU can show: the allocator's peaks in the record, and an out-of-memory end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

MIB = 2**20


@pytest.fixture(autouse=True)
def gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")


def rows(run_dir: Path) -> list[dict[str, Any]]:
    report: dict[str, Any] = json.loads((run_dir / "report.json").read_text())
    ranks: list[dict[str, Any]] = report["ranks"]
    return ranks


def test_the_allocators_peaks_are_recorded_at_exit(home: Any) -> None:
    home.job("import torch; x = torch.empty(256 * 2**20, dtype=torch.uint8, device='cuda'); del x")
    code, run, _ = home.submit_and_wait("--set", "slurm.ntasks_per_node=1")
    assert code == 0
    [row] = rows(run.path)
    assert row["peak_allocated_bytes"] == 256 * MIB
    assert row["peak_reserved_bytes"] >= 256 * MIB
    assert row["source"] == "allocator at exit"


def test_the_last_sample_outlives_sigkill(home: Any) -> None:
    home.job(
        "import os, signal, time, torch\n"
        "x = torch.empty(256 * 2**20, dtype=torch.uint8, device='cuda')\n"
        "time.sleep(3)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    code, run, _ = home.submit_and_wait("--set", "slurm.ntasks_per_node=1")
    assert code == 5
    [row] = rows(run.path)
    assert (row["signal"], row["source"]) == (9, "allocator, last sample")
    assert row["peak_allocated_bytes"] == 256 * MIB


def test_out_of_memory_is_exit_6_with_the_evidence(home: Any) -> None:
    home.job("import torch; torch.empty(2**42, dtype=torch.uint8, device='cuda')")
    code, run, done = home.submit_and_wait("--set", "slurm.ntasks_per_node=1")
    assert code == 6
    [row] = rows(run.path)
    assert row["ended"] == "out of memory"
    assert "OutOfMemoryError" in row["error"]
    assert "gpu_capacity" in done.err
