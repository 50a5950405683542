"""Starts the ranks of a program, and collects what they print."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

WARM = Path(__file__).parent / "programs" / "warm.py"


@dataclass(frozen=True)
class Ranks:
    """What the ranks of one run left behind; [i] is rank i's."""

    stdout: list[str]
    stderr: list[str]

    def results(self) -> list[Any]:
        """The last line of every rank's output, as JSON."""
        return [json.loads(text.splitlines()[-1]) for text in self.stdout]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _environments(world_size: int) -> list[dict[str, str]]:
    """What torchrun gives each rank."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def _run_cold(
    argv: list[str], environments: list[dict[str, str]], logs: Path, timeout_s: float
) -> list[int | None]:
    processes = []
    for rank, environment in enumerate(environments):
        with open(logs / f"{rank}.out", "w") as out, open(logs / f"{rank}.err", "w") as err:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *argv],
                    env={**os.environ, **environment},
                    stdout=out,
                    stderr=err,
                )
            )
    deadline = time.monotonic() + timeout_s
    # One rank that fails leaves the others waiting in a collective.
    while (
        any(process.poll() is None for process in processes)
        and not any(process.poll() for process in processes)
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    for process in processes:
        process.kill()
        process.wait()
    return [process.returncode for process in processes]


@pytest.fixture(scope="session")
def warm() -> Iterator[subprocess.Popen[str]]:
    """See programs/warm.py."""
    with subprocess.Popen(
        [sys.executable, str(WARM)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="session")
def run_ranks(
    warm: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Ranks]:
    """run_ranks(program, world_size, *args, cold=False, timeout_s=60); a failure shows stderr.

    cold: every rank is a Python process of its own, in which the program's imports are the first.
    """

    def run(
        program: Path, world_size: int, *args: str, cold: bool = False, timeout_s: float = 60
    ) -> Ranks:
        logs = tmp_path_factory.mktemp(program.stem)
        argv = [str(program), *args]
        environments = _environments(world_size)
        if cold:
            codes = _run_cold(argv, environments, logs, timeout_s)
        else:
            request = {
                "argv": argv,
                "environments": environments,
                "logs": str(logs),
                "timeout_s": timeout_s,
            }
            assert warm.stdin is not None and warm.stdout is not None
            warm.stdin.write(json.dumps(request) + "\n")
            warm.stdin.flush()
            codes = json.loads(warm.stdout.readline())
        ranks = Ranks(
            stdout=[(logs / f"{rank}.out").read_text() for rank in range(world_size)],
            stderr=[(logs / f"{rank}.err").read_text() for rank in range(world_size)],
        )
        if any(codes):
            tails = [f"--- rank {r}\n{text[-2000:]}" for r, text in enumerate(ranks.stderr)]
            pytest.fail(f"{program.name}: exit codes {codes}\n" + "\n".join(tails))
        return ranks

    return run
