"""The local executor: the rendered script on this machine, when there is no Slurm.

A supervisor process of its own session (`local_job`) runs the script, so the job survives the
terminal and the process that submitted it; state, cancel and re-attach go through `local.json` in
the run directory and work from any process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from secrets import randbelow
from typing import Any

from mtlaunch.launcher.processes import alive
from mtlaunch.launcher.rundir import RunDir
from mtlaunch.launcher.runner.report import read_json
from mtlaunch.launcher.slurm_env import clean_environment
from mtlaunch.launcher.states import JobState

_START_TIMEOUT_S = 20

# Seconds between TERM and KILL: KillWait's default in slurm.conf.
KILL_WAIT_S = 30


class LocalError(RuntimeError):
    """The job cannot run on this machine, or its supervisor did not start."""


def submit(run: RunDir, nodes: int) -> str:
    """Start the script; returns its job id, "local-" and a number. Raises LocalError."""
    if nodes > 1:
        raise LocalError(
            f"the local executor is one node, the job asks for {nodes}: set slurm.nodes=1, or "
            "submit where Slurm answers"
        )
    number = 1_000_000 + randbelow(9_000_000)
    words = [sys.executable, "-m", "mtlaunch.launcher.local_job", str(run.path), str(number)]
    with (run.path / "logs" / "supervisor.log").open("ab") as log:
        supervisor = subprocess.Popen(
            [*words, str(KILL_WAIT_S)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=clean_environment(os.environ),
        )
    try:
        if _started(run, supervisor):
            return f"local-{number}"
    except BaseException:  # Ctrl-C: nobody would ever learn the id of this job
        supervisor.kill()
        supervisor.wait()
        raise
    supervisor.kill()
    said = (run.path / "logs" / "supervisor.log").read_text(errors="replace")[-2000:]
    raise LocalError(f"the supervisor did not start: {said.strip() or 'it said nothing'}")


def _started(run: RunDir, supervisor: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if (run.path / "local.json").exists():
            return True
        if supervisor.poll() is not None:
            return False
        time.sleep(0.02)
    return False


def job_state(run: RunDir) -> JobState:
    local = read_json(run.path / "local.json") or {}
    gone = local.get("state") == "RUNNING" and not _supervised(local)
    if gone:  # it may have written the end, and left, since the file was read
        local = read_json(run.path / "local.json") or {}
    state = str(local.get("state", "UNKNOWN"))
    started = local.get("started_s")
    ended = local.get("ended_s") or time.time()
    elapsed_s = ended - started if started else None
    if gone and state == "RUNNING":
        return JobState("FAILED", None, None, elapsed_s, "the supervisor of the job is gone")
    return JobState(state, local.get("exit_code"), local.get("signal"), elapsed_s)


def cancel(run: RunDir) -> bool:
    """Ask the supervisor to end the job; False when it has ended already."""
    local = read_json(run.path / "local.json") or {}
    if local.get("state") != "RUNNING" or not _supervised(local):
        return False
    os.kill(int(local["pid"]), signal.SIGTERM)
    return True


def _supervised(local: Mapping[str, Any]) -> bool:
    return alive(int(local["pid"]), local.get("start_ticks"))
