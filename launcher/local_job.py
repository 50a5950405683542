"""`python -m mtlaunch.launcher.local_job RUN_DIR NUMBER KILL_WAIT_S`: supervises one local job.

Does what slurmctld and slurmd do for the script: SLURM_* variables, the log, the warning signal,
the time limit, and TERM to the ranks and the script, then KILL after KillWait.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mtlaunch.launcher.processes import (
    adopt_orphans,
    descendants,
    die_with_parent,
    send,
    start_ticks,
)
from mtlaunch.launcher.runner.report import read_json, write_json
from mtlaunch.preflight.slurm_time import time_limit_s

_POLL_S = 0.1

# A process in an uninterruptible wait outlives SIGKILL until that ends.
_GONE_WITHIN_S = 10.0

# A stand-in for a Slurm command. Modules of the job's working directory, a `queue.py` perhaps, must
# not come before Python's own, as they would with `python -m`.
_SHIM = """#!/bin/sh
exec {python} -c 'import sys
sys.path[:] = [entry for entry in sys.path if entry]
from mtlaunch.launcher.{module} import main
sys.exit(main(sys.argv[1:]))' {options}"$@"
"""


def directives(script: str) -> dict[str, str]:
    """Long options of the #SBATCH lines.

    >>> directives('#!/bin/bash\\n#SBATCH --time=01:00:00\\n#SBATCH --job-name="a b"\\nsrun x')
    {'time': '01:00:00', 'job-name': 'a b'}
    """
    found = {}
    for line in script.split("\n"):  # not splitlines: a value may hold U+2028 and its like
        if line.startswith("#SBATCH --"):
            option, _, value = line.removeprefix("#SBATCH --").partition("=")
            found[option.strip()] = "".join(shlex.split(value, comments=True)) if value else ""
        elif line.strip() and not line.startswith("#"):
            break
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Supervisor:
    """Runs the script of one run directory to its end."""

    def __init__(self, run_dir: Path, number: int, kill_wait_s: float) -> None:
        self.run_dir, self.number, self.kill_wait_s = run_dir, number, kill_wait_s
        self.options = directives((run_dir / "job.sbatch").read_text(encoding="utf-8"))
        self.ending: str | None = None  # CANCELLED or TIMEOUT, once asked
        self.ranks_told = False
        self.kill_at: float | None = None

    def run(self) -> None:
        adopt_orphans()  # what the job leaves behind stays findable as our child
        signal.signal(signal.SIGTERM, lambda number, frame: self.end("CANCELLED"))
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        state: dict[str, Any] = {
            "job_id": f"local-{self.number}",
            "pid": os.getpid(),
            "start_ticks": start_ticks(os.getpid()),
            "state": "RUNNING",
            "started_s": time.time(),
        }
        with (self.run_dir / "logs" / f"{self.number}.log").open("ab") as log:
            self.script = subprocess.Popen(
                ["bash", str(self.run_dir / "job.sbatch")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.run_dir,
                env=self.environment(),
                restore_signals=True,
                preexec_fn=_as_batch_script,
            )
        write_json(self.run_dir / "local.json", state)
        code = self.wait()
        end_descendants()  # what the script left behind
        final = self.ending or ("COMPLETED" if code == 0 else "FAILED")
        state |= {
            "state": final,
            "exit_code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
            "ended_s": time.time(),
        }
        write_json(self.run_dir / "local.json", state)

    def environment(self) -> dict[str, str]:
        """The submit environment with the variables that the script reads of Slurm."""
        tools = self.run_dir / "local" / "bin"
        tools.mkdir(parents=True, exist_ok=True)
        for tool, options in (("srun", f"--kill-wait={self.kill_wait_s} "), ("scancel", "")):
            shim = _SHIM.format(
                python=shlex.quote(sys.executable), module=f"local_{tool}", options=options
            )
            (tools / tool).write_text(shim)
            (tools / tool).chmod(0o755)
        launch = read_json(self.run_dir / "payload" / "launch.json") or {}
        tasks = self.options.get("ntasks-per-node", str(launch.get("ranks_per_node", 1)))
        host = socket.gethostname()
        environ = {
            **os.environ,
            "PATH": f"{tools}:{os.environ.get('PATH', os.defpath)}",
            "MTLAUNCH_LOCAL_DIR": str(self.run_dir / "local"),
            "SLURM_JOB_ID": str(self.number),
            "SLURM_JOB_NAME": self.options.get("job-name", "job"),
            "SLURM_JOB_NODELIST": host,
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NNODES": "1",
            "SLURM_NTASKS": tasks,
            "SLURM_NTASKS_PER_NODE": tasks,
            "SLURM_SUBMIT_DIR": str(self.run_dir),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
        if "cpus-per-task" in self.options:
            environ["SLURM_CPUS_PER_TASK"] = self.options["cpus-per-task"]
        return environ

    def wait(self) -> int:
        started = time.monotonic()
        limit_s = time_limit_s(self.options.get("time", ""))
        warning = re.fullmatch(r"B:(?:SIG)?(\w+)@(\d+)", self.options.get("signal", ""))
        warned = False
        while True:
            try:
                return self.script.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                pass
            now = time.monotonic()
            if limit_s is not None:
                if warning and not warned and now - started >= limit_s - int(warning[2]):
                    warned = True
                    send([self.script.pid], getattr(signal, f"SIG{warning[1]}", signal.SIGUSR1))
                if now - started >= limit_s and self.ending is None:
                    self.end("TIMEOUT")
            if self.ending is not None:
                self.tell_ranks()
            if self.kill_at is not None and now >= self.kill_at:
                send([self.script.pid, *descendants(os.getpid())], signal.SIGKILL)

    def end(self, state: str) -> None:
        """TERM to the ranks and the script, as scancel and the time limit do; KILL later."""
        if self.ending is None:
            self.ending = state
            self.kill_at = time.monotonic() + self.kill_wait_s
            self.tell_ranks()
            send([self.script.pid], signal.SIGTERM)

    def tell_ranks(self) -> None:
        """TERM to the ranks once, as soon as there are any: the end may come while they start."""
        if not self.ranks_told:
            ranks = step_processes(self.run_dir / "local")
            self.ranks_told = bool(ranks)
            send(ranks, signal.SIGTERM)


def end_descendants() -> None:
    """SIGKILL to every process below this one, and wait until they are gone.

    A final state says that nothing of the job runs any more.
    """
    deadline = time.monotonic() + _GONE_WITHIN_S
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        send(left, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:  # orphans are ours to reap
                pass
        except ChildProcessError:
            pass
        time.sleep(0.02)


def step_processes(local_dir: Path) -> list[int]:
    """Every process below the running srun, which itself is left alone."""
    step = read_json(local_dir / "step.json")
    if step is None or start_ticks(step["pid"]) != step["start_ticks"]:
        return []
    return descendants(step["pid"])


def _as_batch_script() -> None:
    """Between fork and exec. Without its supervisor nothing of a job may go on unseen."""
    die_with_parent()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    Supervisor(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])).run()
