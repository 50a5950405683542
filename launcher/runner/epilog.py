"""`python epilog.py start|end RUN_DIR [EXIT_CODE]`: status.json at both ends, then report.json.

Runs on the first node of the job, from the script's EXIT trap, within a few seconds.
"""

import os
import sys
import time
from pathlib import Path


def main(event: str, run_dir: Path, exit_code: int) -> None:
    from mtlaunch.launcher.runner.report import build, read_json, write_json

    path = run_dir / "status.json"
    status: dict[str, object] = {
        "schema": "mtlaunch.status/1",
        "job_id": os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID"),
        "attempt": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
    }
    if event == "start":
        write_json(path, {**status, "state": "RUNNING", "started_s": time.time()})
        return
    started = read_json(path) or {}
    status = {
        **status,
        "state": "COMPLETED" if exit_code == 0 else "FAILED",
        "exit_code": exit_code,
        "started_s": started.get("started_s"),
        "ended_s": time.time(),
    }
    write_json(path, status)
    report = build(run_dir)
    write_json(run_dir / "report.json", report)
    recorded, ranks = report["summary"]["recorded"], report["summary"]["ranks"]
    print(f"[mtlaunch] report of {recorded} of {ranks} ranks: {run_dir / 'report.json'}")


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
