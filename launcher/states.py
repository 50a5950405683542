"""Job states in Slurm's words, and the exit codes of `--wait`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtlaunch.launcher.runner.outcome import FINAL_STATES

EXIT_OK = 0
EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_SCHEDULER = 4
EXIT_FAILED = 5
EXIT_OUT_OF_MEMORY = 6
EXIT_CANCELLED = 7
EXIT_TIMEOUT = 8
EXIT_NODE_FAILURE = 9
EXIT_UNAVAILABLE = 69
EXIT_BUG = 70
EXIT_INTERRUPTED = 130

_EXIT_BY_STATE = {
    "COMPLETED": EXIT_OK,
    "CANCELLED": EXIT_CANCELLED,
    "REVOKED": EXIT_CANCELLED,
    "PREEMPTED": EXIT_CANCELLED,
    "TIMEOUT": EXIT_TIMEOUT,
    "DEADLINE": EXIT_TIMEOUT,
    "NODE_FAIL": EXIT_NODE_FAILURE,
    "BOOT_FAIL": EXIT_NODE_FAILURE,
    "OUT_OF_MEMORY": EXIT_OUT_OF_MEMORY,
}


@dataclass(frozen=True, slots=True)
class JobState:
    """What an executor knows of a job. `exit_code` is the batch script's, `signal` its end."""

    state: str
    exit_code: int | None = None
    signal: int | None = None
    elapsed_s: float | None = None
    reason: str = ""

    @property
    def final(self) -> bool:
        return self.state in FINAL_STATES

    def to_json(self) -> dict[str, Any]:
        return {"state": self.state, "exit_code": self.exit_code, "elapsed_s": self.elapsed_s}


def exit_code_of(state: JobState, report: Mapping[str, Any] | None) -> int:
    """mtlaunch's exit code for a finished job: a rank's own out-of-memory error counts as one."""
    code = _EXIT_BY_STATE.get(state.state, EXIT_FAILED)
    ranks = (report or {}).get("ranks", [])
    if code == EXIT_FAILED and any(row.get("ended") == "out of memory" for row in ranks):
        return EXIT_OUT_OF_MEMORY
    return code
