"""`python epilog.py start|end RUN_DIR [EXIT_CODE]`: status.json at both ends, then report.json.

Runs on the first node of the job, from the script's EXIT trap, within a few seconds. A full disk
may take one of the files: the other is written all the same.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(event: str, run_dir: Path, exit_code: int) -> int:
    """0 when everything was written, else 1."""
    path = run_dir / "status.json"
    if event == "start":
        return 0 if _attempt(path, lambda: _write(path, status_at_start())) else 1
    status = status_at_end(path, exit_code)
    written = [
        _attempt(path, lambda: _write(path, status)),
        _attempt(run_dir / "report.json", lambda: _report(run_dir, status)),
    ]
    return 0 if all(written) else 1


def status_at_start() -> dict[str, Any]:
    return {**_identity(), "state": "RUNNING", "started_s": time.time()}


def status_at_end(path: Path, exit_code: int) -> dict[str, Any]:
    from mtlaunch.launcher.runner.outcome import EXIT_NEAR_LIMIT
    from mtlaunch.launcher.runner.report import read_json

    return {
        **_identity(),
        "state": "COMPLETED" if exit_code == 0 else "FAILED",
        "exit_code": exit_code,
        # saved and left before the time limit: not a finished training, not a fault either
        "checkpointed": exit_code == EXIT_NEAR_LIMIT,
        "started_s": (read_json(path) or {}).get("started_s"),
        "ended_s": time.time(),
    }


def _identity() -> dict[str, Any]:
    return {
        "schema": "mtlaunch.status/1",
        "job_id": os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID"),
        "attempt": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    from mtlaunch.launcher.runner.report import write_json

    write_json(path, content)


def _report(run_dir: Path, status: dict[str, Any]) -> None:
    from mtlaunch.launcher.runner.report import build

    report = build(run_dir, status=status)
    _write(run_dir / "report.json", report)
    recorded, ranks = report["summary"]["recorded"], report["summary"]["ranks"]
    print(f"[mtlaunch] report of {recorded} of {ranks} ranks: {run_dir / 'report.json'}")


def _attempt(path: Path, write: Callable[[], None]) -> bool:
    """Any error is said and survived: what comes after must be tried as well."""
    try:
        write()
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else repr(error)
        print(f"[mtlaunch] {path.name} was not written: {reason}", file=sys.stderr, flush=True)
        return False
    return True


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0))
