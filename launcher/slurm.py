"""The Slurm executor, on submitit's: the only module that runs sbatch, sacct, squeue, scancel.

submitit's executor pickles a Python function and writes its own script. Here the script is ours,
byte for byte, so the parts that write, submit and parse are overridden; its Job and its
information watcher stay. All of that is underscore API, hence the pinned minor version and the
test against a real Slurm.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from submitit.core.utils import CommandFunction, FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob

from mtlaunch.launcher.rundir import RunDir
from mtlaunch.launcher.slurm_env import clean_environment
from mtlaunch.launcher.states import FINAL_STATES, JobState


class SchedulerError(RuntimeError):
    """sbatch refused; the message is its own."""


def unavailable_reason() -> str | None:
    """Why there is no Slurm here, or None: it must answer, not just be installed."""
    if shutil.which("scontrol") is None or shutil.which("sbatch") is None:
        return "scontrol and sbatch are not on PATH"
    try:
        ping = subprocess.run(
            ["scontrol", "ping"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"scontrol ping: {error}"
    if ping.returncode == 0 and re.search(r"\bis UP\b", ping.stdout):
        return None
    lines = (ping.stdout + ping.stderr).strip().splitlines()
    return "scontrol ping: " + (lines[-1] if lines else f"exit {ping.returncode}")


class _Watcher(SlurmInfoWatcher):
    """submitit's sacct poller with the fields a verdict needs and a positive list of ends."""

    def _make_command(self) -> list[str] | None:
        command: list[str] | None = super()._make_command()
        if command is not None:
            fields = "JobID,State,NodeList,ExitCode,DerivedExitCode,ElapsedRaw,Reason"
            command[command.index("-o") + 1] = fields
        return command

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        words = self.get_state(job_id, mode=mode).split() or ["UNKNOWN"]
        return words[0].rstrip("+") in FINAL_STATES


class Job(SlurmJob[Any]):
    """submitit's Job for one of our scripts: polled by id, from any process."""

    watcher = _Watcher(delay_s=30)

    def job_state(self) -> JobState:
        """The state by sacct, or by squeue and scontrol where accounting does not know it."""
        job_id = str(self.job_id)
        known = _from_sacct(self.watcher.get_info(job_id, mode="force"))
        if known is not None and known.final:
            return known
        # sacct lags behind by seconds, or is not there at all: the controller knows first
        return _from_scontrol(job_id) or known or JobState("UNKNOWN")

    def done(self, force_check: bool = False) -> bool:
        return self.job_state().final

    def result(self) -> Any:
        raise NotImplementedError("a training job returns a report, not a value: see report.json")

    results = exception = result


class Executor(SlurmExecutor):
    """Submits the script of a run directory as it is."""

    job_class = Job

    def __init__(self, run: RunDir) -> None:
        super().__init__(folder=run.path)
        self._run = run

    def submit_script(self) -> Job:
        """Queue the script. Raises SchedulerError with sbatch's own words."""
        before = dict(os.environ)
        os.environ.clear()
        os.environ.update(clean_environment(before))
        try:
            return self._submit_command("")
        except (FailedJobError, FailedSubmissionError, OSError) as error:
            raise SchedulerError(_sbatch_words(error)) from error
        finally:
            os.environ.clear()
            os.environ.update(before)

    def _submit_command(self, command: str) -> Job:
        # submitit would copy the script to a file of its own and link it; ours lies ready
        output = CommandFunction(self._make_submission_command(self._run.script), verbose=False)()
        return attach(self._run, self._get_job_id_from_submission_command(output))

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", "--parsable", str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        text = string.decode(errors="replace") if isinstance(string, bytes) else string
        # "12;cluster", after any line that a submit plugin of the site printed
        for line in reversed(text.strip().splitlines()):
            job_id = line.split(";")[0].strip()
            if job_id.isdigit():
                return job_id
        raise FailedSubmissionError(f"sbatch answered {text!r}, which names no job id")


def attach(run: RunDir, job_id: str) -> Job:
    """The Job of an id, from another process or after a restart.

    One task: the ranks report through their records, not through submitit's pickles.
    """
    return Job(folder=run.path, job_id=job_id, tasks=[0])


def cancel(job_id: str) -> None:
    """Raises SchedulerError."""
    done = subprocess.run(["scancel", job_id], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SchedulerError(done.stderr.strip() or f"scancel: exit {done.returncode}")


def _sbatch_words(error: BaseException) -> str:
    text = str(error)
    found = [line.strip() for line in text.splitlines() if "sbatch:" in line]
    return "\n".join(dict.fromkeys(found)) or text.strip()


def _from_sacct(info: Mapping[str, str]) -> JobState | None:
    """State of a sacct row: "CANCELLED by 0", "FAILED" with ExitCode "3:0"."""
    words = info.get("State", "").split()
    if not words:
        return None
    code, _, number = info.get("ExitCode", "").partition(":")
    elapsed = info.get("ElapsedRaw", "")
    return JobState(
        words[0].rstrip("+"),
        int(code) if code.isdigit() else None,
        int(number) if number.isdigit() and int(number) else None,
        float(elapsed) if elapsed.isdigit() else None,
    )


def _from_scontrol(job_id: str) -> JobState | None:
    """State by the controller, which forgets a job some minutes after its end (MinJobAge)."""
    shown = subprocess.run(
        ["scontrol", "show", "job", "--oneliner", job_id],
        capture_output=True,
        text=True,
        check=False,
    )
    fields = dict(re.findall(r"(\w+)=(\S*)", shown.stdout))
    if "JobState" not in fields:
        return None
    code, _, number = fields.get("ExitCode", "").partition(":")
    reason = fields.get("Reason", "")
    return JobState(
        fields["JobState"],
        int(code) if code.isdigit() else None,
        int(number) if number.isdigit() and int(number) else None,
        _clock_seconds(fields.get("RunTime", "")),
        "" if reason == "None" else reason,
    )


def _clock_seconds(text: str) -> float | None:
    """Seconds of Slurm's [D-]HH:MM:SS.

    >>> _clock_seconds("1-00:00:05"), _clock_seconds("00:01:07")
    (86405.0, 67.0)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
