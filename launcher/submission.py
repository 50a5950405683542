"""Submit, follow, cancel and report a run, on Slurm or on this machine."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from mtlaunch.launcher import rundir, show, states
from mtlaunch.launcher.render import RenderError, render
from mtlaunch.launcher.rundir import RunDir
from mtlaunch.launcher.runner.report import build, write_json
from mtlaunch.launcher.states import JobState
from mtlaunch.launcher.tail import follow_log
from mtlaunch.preflight.jobfile import Job
from mtlaunch.preflight.plan import Plan
from mtlaunch.preflight.verdict import check

# How often a waiting submit asks: a local job's file, the controller.
_LOCAL_POLL_S = 0.2
_SLURM_POLL_S = 3.0

# Without a controller that answers, a waiting submit gives up after this long.
_LOST_AFTER_S = 600.0


class SubmissionError(RuntimeError):
    """What keeps a job from being queued; `exit_code` is mtlaunch's."""

    def __init__(self, exit_code: int, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.exit_code, self.hint = exit_code, hint


@dataclass(frozen=True, slots=True)
class Options:
    """Of the submit command."""

    ignored: tuple[str, ...] = ()
    template_dir: Path | None = None
    runs: str | None = None
    executor: str = "auto"
    wait: bool = False
    dry_run: bool = False
    json: bool = False


def say(text: str) -> None:
    click.echo(text, err=True)


def submit(job: Job, plan: Plan, options: Options) -> int:
    """The whole way from a Plan to a queued job. Returns the exit code."""
    printer = show.Printer(sys.stderr)
    verdict = check(plan, ignore=options.ignored)
    show.findings(printer, verdict, job.document.source)
    show.verdict_lines(printer, verdict)
    if verdict.refused:
        if options.json:
            click.echo(json.dumps(verdict.to_json()))
        say("nothing was queued; --ignore ID overrides a rule, if you know better")
        return states.EXIT_REFUSED
    workdir = _workdir(job, plan)
    _check_machine(plan, workdir)
    executor = _choose_executor(options.executor)
    run_id = rundir.new_run_id()
    path = rundir.default_runs(options.runs) / plan.name / run_id
    python = sys.executable if executor == "local" else None
    try:
        script = render(plan, str(path), str(workdir), python, options.template_dir)
    except RenderError as error:
        raise SubmissionError(states.EXIT_USAGE, str(error)) from error
    if options.dry_run:
        say(f"dry run: would submit {path}/job.sbatch with the {executor} executor")
        return states.EXIT_OK
    try:
        run = rundir.create(
            path,
            plan,
            script,
            _resolved(job, plan, workdir, options),
            None if verdict.estimate is None else verdict.estimate.to_json(),
            options.ignored,
        )
    except OSError as error:
        message = f"cannot make the run directory {path}: {error.strerror or error}"
        raise SubmissionError(states.EXIT_USAGE, message, "--runs DIR") from error
    job_id = _queue(run, plan, executor)
    say(f"submitted: job {job_id}, run directory {path}")
    click.echo(
        json.dumps({"schema": "mtlaunch.submit/1", "job_id": job_id, "run_dir": str(path)})
        if options.json
        else job_id
    )
    sys.stdout.flush()
    if options.wait:
        return wait(run)
    say(f"next: mtlaunch status {job_id} | mtlaunch logs -f {job_id} | mtlaunch report {job_id}")
    return states.EXIT_OK


def _resolved(job: Job, plan: Plan, workdir: Path, options: Options) -> str:
    from mtlaunch.launcher.resolved import resolved_yaml

    return resolved_yaml(job, plan, str(workdir), options.ignored)


def _workdir(job: Job, plan: Plan) -> Path:
    """Where the script runs: `workdir`, from the job file's folder, which is the default."""
    base = Path.cwd() if job.file == "<stdin>" else Path(job.file).absolute().parent
    return Path(os.path.normpath(base / (plan.workdir or ".")))


def _check_machine(plan: Plan, workdir: Path) -> None:
    """What `check` does not look at: the file system and the submit shell."""
    refused = states.EXIT_REFUSED
    if not workdir.is_dir():
        raise SubmissionError(refused, f"workdir {workdir} is no folder", "set workdir:")
    if not plan.entrypoint_is_module and plan.container is None:
        script = workdir / str(plan.entrypoint)
        if not script.is_file():
            message = f"entrypoint {script} does not exist"
            raise SubmissionError(refused, message, "a path from workdir, or {module: name}")
    missing = [name for name in plan.secrets if name not in os.environ]
    if missing:
        hint = f"export {missing[0]}=... before mtlaunch submit"
        raise SubmissionError(refused, f"secrets not set here: {', '.join(missing)}", hint)
    if plan.lora is not None and plan.is_bridge:
        message = "lora: is attached by this version to megatron-core models, not to Bridge's"
        raise SubmissionError(refused, message, "set peft.* in args and drop lora:")


def _choose_executor(asked: str) -> str:
    if asked == "local":
        say("executor: local, as asked")
        return "local"
    from mtlaunch.launcher.slurm import unavailable_reason

    reason = unavailable_reason()
    if asked == "slurm":
        if reason is not None:
            raise SubmissionError(
                states.EXIT_UNAVAILABLE, f"no Slurm here: {reason}", "--executor local"
            )
        say("executor: slurm, as asked; scontrol ping answers")
        return "slurm"
    if reason is None:
        say("executor: slurm, because scontrol ping answers")
        return "slurm"
    say(f"executor: local, because there is no Slurm here ({reason})")
    return "local"


def _queue(run: RunDir, plan: Plan, executor: str) -> str:
    if executor == "local":
        from mtlaunch.launcher import local

        try:
            job_id = local.submit(run, plan.nodes)
        except local.LocalError as error:
            rundir.remove(run)
            raise SubmissionError(states.EXIT_UNAVAILABLE, str(error)) from error
    else:
        from mtlaunch.launcher import slurm

        try:
            job_id = str(slurm.Executor(run).submit_script().job_id)
        except slurm.SchedulerError as error:
            rundir.remove(run)
            raise SubmissionError(states.EXIT_SCHEDULER, f"sbatch refused: {error}") from error
    submitted = {"executor": executor, "job_id": job_id, "submitted_s": time.time()}
    # The job is queued: from here on nothing may lose its id.
    for keep, words in (
        (partial(write_json, run.path / "submission.json", submitted), "submission.json"),
        (partial(rundir.link_job_id, run, job_id), "the link of its id"),
        (partial(rundir.remember, run, plan.name, job_id, executor), "the index"),
    ):
        try:
            keep()
        except OSError as error:
            say(f"warning: job {job_id} is queued, but {words} could not be written: {error}")
    return job_id


def job_state(run: RunDir) -> JobState:
    """What the run's executor says of it; the run directory's own word where it does not know."""
    submitted = run.submission
    if submitted.get("executor") == "local":
        from mtlaunch.launcher import local

        return local.job_state(run)
    state = JobState("UNKNOWN")
    if submitted.get("job_id"):
        from mtlaunch.launcher.slurm import attach, unavailable_reason

        if unavailable_reason() is None:
            state = attach(run, str(submitted["job_id"])).job_state()
    return state


def cancel(run: RunDir) -> None:
    submitted = run.submission
    job_id = str(submitted.get("job_id"))
    if submitted.get("executor") == "local":
        from mtlaunch.launcher import local

        asked = local.cancel(run)
        say(f"{job_id}: asked to end" if asked else f"{job_id} has ended already")
        return
    from mtlaunch.launcher import slurm

    try:
        slurm.cancel(job_id)
    except (slurm.SchedulerError, OSError) as error:
        raise SubmissionError(states.EXIT_SCHEDULER, str(error)) from error
    say(f"{job_id}: asked to end")


def refresh_report(run: RunDir, state: JobState | None = None) -> dict[str, Any]:
    """Rebuild the report from the records with the scheduler's word, and keep it when final."""
    state = state or job_state(run)
    word = {} if state.state == "UNKNOWN" else state.to_json()
    content = build(run.path, {"id": run.submission.get("job_id"), **word})
    if state.final:
        try:
            write_json(run.path / "report.json", content)
        except OSError as error:
            say(f"warning: report.json not written: {error}")
    return content


def wait(run: RunDir) -> int:
    """Follow a job to its end, print its report, return its exit code. Ctrl-C leaves the job."""
    job_id = str(run.submission.get("job_id"))
    local = run.submission.get("executor") == "local"
    watch = _Watch(run, _LOCAL_POLL_S if local else _SLURM_POLL_S)
    try:
        for line in follow_log(run.log(job_id), watch.ended, _LOCAL_POLL_S):
            if _worth_showing(line):
                say(line)
    except KeyboardInterrupt:
        say(f"\njob {job_id} goes on; mtlaunch report {job_id} when it has ended")
        return states.EXIT_INTERRUPTED
    content = refresh_report(run, watch.state)
    show.report(show.Printer(sys.stderr), content)
    say(f"report: {run.path / 'report.json'}")
    return states.exit_code_of(watch.state, content)


def _worth_showing(line: str) -> bool:
    """The script's own lines and rank 0's; those of other ranks are in the log."""
    label = re.match(r"\s*(\d+): ", line)
    return label is None or label[1] == "0"


class _Watch:
    """Polls a job's state no more often than its executor likes, and says when it changes."""

    def __init__(self, run: RunDir, every_s: float) -> None:
        self._run, self._every_s = run, every_s
        self.state = JobState("PENDING")
        self._asked = float("-inf")
        self._shown = ""
        self._known = time.monotonic()

    def ended(self) -> bool:
        now = time.monotonic()
        if now - self._asked >= self._every_s:
            self._asked = now
            state = job_state(self._run)
            if state.state != "UNKNOWN":
                self.state, self._known = state, now
            elif now - self._known > _LOST_AFTER_S:
                raise SubmissionError(
                    states.EXIT_UNAVAILABLE,
                    f"no word of the job for {_LOST_AFTER_S:.0f} s",
                    f"mtlaunch report {self._run.path}",
                )
            words = self.state.state + (f" ({self.state.reason})" if self.state.reason else "")
            if words != self._shown:
                self._shown = words
                say(f"job {self._run.submission.get('job_id')}: {words}")
        return self.state.final
