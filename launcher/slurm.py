"""The Slurm executor, on submitit's: the only module that runs sbatch, scontrol, sacct, scancel.

submitit's executor pickles a Python function and writes its own script. Here the script is ours,
byte for byte, so the parts that write, submit and parse are overridden; its Job and its
information watcher stay. All of that is underscore API, hence the pinned minor version and the
test against a real Slurm.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob

from mtlaunch.launcher.rundir import RunDir
from mtlaunch.launcher.runner.outcome import FINAL_STATES
from mtlaunch.launcher.slurm_env import clean_environment
from mtlaunch.launcher.states import JobState

# srun is submitit's and the script's; the controller may be asked from a host without it.
_NEEDED = ("scontrol", "sbatch", "srun")

# A controller under load answers late; one that is gone, never.
_ANSWER_TIMEOUT_S = 60.0


class SchedulerError(RuntimeError):
    """Slurm refused, and nothing is queued; the message is its own."""


class LostJobError(RuntimeError):
    """sbatch may have queued a job whose id is not known."""


def unavailable_reason() -> str | None:
    """Why there is no Slurm here, or None: it must answer, not just be installed."""
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        return f"not on PATH: {', '.join(missing)}"
    try:
        ping = _run(["scontrol", "ping"], timeout_s=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"scontrol ping: {error}"
    if ping.returncode == 0 and re.search(r"\bis UP\b", ping.stdout):
        return None
    lines = (ping.stdout + ping.stderr).strip().splitlines()
    return "scontrol ping: " + (lines[-1] if lines else f"exit {ping.returncode}")


def _run(
    command: Sequence[str], timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Without the SLURM_* of the shell: SLURM_CLUSTERS would ask another cluster."""
    return subprocess.run(
        command,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env=clean_environment(os.environ),
        timeout=timeout_s,
        check=False,
    )


class _Watcher(SlurmInfoWatcher):
    """submitit's sacct poller with the fields a verdict needs and a positive list of ends."""

    def __init__(self, cluster: str) -> None:
        super().__init__(delay_s=30)
        self._cluster = cluster

    def _make_command(self) -> list[str] | None:
        command: list[str] | None = super()._make_command()
        if command is not None:
            fields = "JobID,State,NodeList,ExitCode,DerivedExitCode,ElapsedRaw,Reason"
            command[command.index("-o") + 1] = fields
            command += _on(self._cluster)
        return command

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        words = self.get_state(job_id, mode=mode).split() or ["UNKNOWN"]
        return words[0].rstrip("+") in FINAL_STATES


@functools.cache
def _watcher(cluster: str) -> _Watcher:
    """One for all jobs of a cluster, as submitit has it: it asks for all of them at once."""
    return _Watcher(cluster)


class Job(SlurmJob[Any]):
    """submitit's Job for one of our scripts: polled by id, from any process.

    `cluster` is the one that sbatch named, "" for the shell's own: an id alone is another job
    on another cluster.
    """

    def __init__(
        self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,), cluster: str = ""
    ) -> None:
        self.cluster = cluster
        self.watcher = _watcher(cluster)
        super().__init__(folder=folder, job_id=job_id, tasks=tasks)

    def job_state(self) -> JobState:
        """The controller's word; when it has forgotten the job, accounting's or the job's own.

        In this order, because sacct keeps the NODE_FAIL of a job that is queued again.
        """
        if shutil.which("scontrol") is None:
            return self._own_word() or JobState("UNKNOWN", reason="no scontrol on this machine")
        told = _from_scontrol(str(self.job_id), self.cluster)
        if told is not None:
            return told
        known = _from_sacct(self.watcher.get_info(str(self.job_id)))
        if known is not None and known.final:
            return known
        # a job that the controller forgot has ended, whatever an accounting that lags says
        unknown = JobState("UNKNOWN", reason="Slurm does not know the job")
        return self._own_word() or known or unknown

    def _own_word(self) -> JobState | None:
        return RunDir(Path(self.paths.folder)).ended_state()

    def done(self, force_check: bool = False) -> bool:
        return self.job_state().final

    def cancel(self, check: bool = True) -> None:
        """Raises SchedulerError."""
        try:
            done = _run(["scancel", *_on(self.cluster), str(self.job_id)])
        except OSError as error:
            raise SchedulerError(f"scancel: {error.strerror or error}") from error
        if check and done.returncode:
            raise SchedulerError(done.stderr.strip() or f"scancel: exit {done.returncode}")

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
        """Queue the script. Raises SchedulerError when nothing is queued, else LostJobError."""
        return self._submit_command("")

    def _submit_command(self, command: str) -> Job:
        # submitit would copy the script to a file of its own and link it; ours lies ready.
        # Its CommandFunction kills sbatch at a character that is no UTF-8, the job queued or not.
        try:
            # no time limit: an sbatch that is killed may have queued the job
            done = _run(self._make_submission_command(self._run.script))
        except OSError as error:
            raise SchedulerError(f"sbatch: {error.strerror or error}") from error
        if done.returncode < 0:
            raise LostJobError(f"sbatch was killed by signal {-done.returncode}: maybe it queued")
        if done.returncode:
            raise SchedulerError(_sbatch_words(done))
        found = read_answer(done.stdout)
        if found is None:
            answer = (done.stdout + done.stderr).strip()
            raise LostJobError(f"a job WAS queued, but sbatch did not name its id: {answer!r}")
        return attach(self._run, *found)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", "--parsable", str(submission_file_path)]


def read_answer(text: str) -> tuple[str, str] | None:
    """Job id and cluster ("" where none is named) of what sbatch says, among a site's own lines.

    >>> read_answer("12;west"), read_answer("quota: 3\\nSubmitted batch job 12")
    (('12', 'west'), ('12', ''))
    """
    # a wrapper that drops --parsable
    said = re.search(r"Submitted batch job (\d+)(?: on cluster (\S+))?", text)
    if said is not None:
        return said[1], said[2] or ""
    for line in reversed(text.splitlines()):
        bare = re.fullmatch(r"(\d+)(?:;(\S*))?", line.strip())
        if bare is not None:
            return bare[1], bare[2] or ""
    return None


def attach(run: RunDir, job_id: str, cluster: str = "") -> Job:
    """The Job of an id, from another process or after a restart.

    One task: the ranks report through their records, not through submitit's pickles.
    """
    return Job(folder=run.path, job_id=job_id, tasks=[0], cluster=cluster)


def _on(cluster: str) -> list[str]:
    """The option that every command takes which is to ask another cluster."""
    return ["-M", cluster] if cluster else []


def _sbatch_words(done: subprocess.CompletedProcess[str]) -> str:
    text = (done.stderr.strip() or done.stdout.strip()) or f"exit {done.returncode}"
    found = [line.strip() for line in text.splitlines() if "sbatch:" in line]
    return "\n".join(dict.fromkeys(found)) or text


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


def _from_scontrol(job_id: str, cluster: str) -> JobState | None:
    """State by the controller; None when it has forgotten the job, MinJobAge after its end.

    A controller that does not answer knows the job, so that is UNKNOWN with its words.
    """
    command = ["scontrol", *_on(cluster), "show", "job", "--oneliner", job_id]
    try:
        shown = _run(command, _ANSWER_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return JobState("UNKNOWN", reason=f"scontrol: {error}")
    # the first of each name: Comment= and Command= come late and may hold anything
    fields = dict(reversed(re.findall(r"(\w+)=(\S*)", shown.stdout)))
    if "JobState" not in fields:
        words = (shown.stderr + shown.stdout).strip()
        if "Invalid job id" in words:
            return None
        return JobState("UNKNOWN", reason=words.replace("\n", " ") or "scontrol said nothing")
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
