"""Submit, follow, cancel and report a run, on Slurm or on this machine."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
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

# How often a log is read.
_LOG_POLL_S = 0.2

# How often a state is asked for, at first and at most: a local job's file costs nothing; one
# controller serves everybody who waits.
_LOCAL_POLL_S = (0.2, 0.2)
_SLURM_POLL_S = (0.5, 10.0)
_POLL_GROWTH = 1.5

SCHEMA = "mtlaunch.submit/1"

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
        if options.json:
            content = {"dry_run": True, "executor": executor, "run_dir": str(path)}
            click.echo(json.dumps({"schema": SCHEMA, **content}))
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
        json.dumps({"schema": SCHEMA, "job_id": job_id, "run_dir": str(path)})
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
    submitted: dict[str, Any] = {"executor": executor, "submitted_s": time.time()}
    if executor == "local":
        job_id = _start_here(run, plan)
    else:
        job_id, cluster = _queue_in_slurm(run, plan, submitted)
        submitted |= {"cluster": cluster} if cluster else {}
    submitted["job_id"] = job_id
    # The job is queued: from here on nothing may lose its id.
    _keep_or_say("submission.json", partial(_record, run, submitted))
    _keep_or_say("the link of its id", partial(rundir.link_job_id, run, job_id))
    _keep_or_say("the index", partial(rundir.remember, run, plan.name, job_id, executor))
    return job_id


def _start_here(run: RunDir, plan: Plan) -> str:
    from mtlaunch.launcher import local

    try:
        return local.submit(run, plan.nodes)
    except BaseException as error:
        rundir.remove(run)
        if isinstance(error, local.LocalError | OSError):
            raise SubmissionError(states.EXIT_UNAVAILABLE, str(error)) from error
        raise


def _queue_in_slurm(run: RunDir, plan: Plan, submitted: dict[str, Any]) -> tuple[str, str]:
    """Job id and cluster. Once sbatch may have queued the job, its run directory stays."""
    from mtlaunch.launcher import slurm

    try:
        executor = slurm.Executor(run)
    except BaseException:
        rundir.remove(run)
        raise
    try:
        job = executor.submit_script()
    except slurm.SchedulerError as error:
        rundir.remove(run)
        raise SubmissionError(states.EXIT_SCHEDULER, f"sbatch refused: {error}") from error
    except slurm.LostJobError as error:
        # once the job says its id, it must not be asked for on this cluster
        asked = plan.slurm.get("clusters")
        submitted |= {"cluster": str(asked)} if asked else {}
        _keep_or_say("submission.json", partial(_record, run, submitted))
        found = f"squeue --me --name={plan.name} shows it; mtlaunch report {run.path}"
        message = f"{error}\n  its run directory is kept: {run.path}"
        raise SubmissionError(states.EXIT_SCHEDULER, message, found) from error
    except BaseException:
        say(f"sbatch was interrupted, the job may be queued: {run.path} is kept")
        raise
    return str(job.job_id), job.cluster


def _record(run: RunDir, submitted: dict[str, Any]) -> None:
    write_json(run.path / "submission.json", submitted)


def _keep_or_say(words: str, keep: Callable[[], None]) -> None:
    try:
        keep()
    except OSError as error:
        say(f"warning: the job is queued, but {words} could not be written: {error}")


def job_state(run: RunDir) -> JobState:
    """What the run's executor says of it; the run directory's own word where it does not know."""
    return _asker(run)()


def _asker(run: RunDir) -> Callable[[], JobState]:
    """Asks for the state of a run, again and again."""
    submitted = run.submission
    if submitted.get("executor") == "local":
        from mtlaunch.launcher import local

        return partial(local.job_state, run)
    if run.job_id is None:
        return lambda: run.ended_state() or JobState("UNKNOWN")
    from mtlaunch.launcher.slurm import attach

    return attach(run, run.job_id, str(submitted.get("cluster") or "")).job_state


def cancel(run: RunDir) -> None:
    submitted, job_id = run.submission, run.job_id
    if job_id is None:
        raise SubmissionError(
            states.EXIT_SCHEDULER, "the id of this job is not known", "squeue --me"
        )
    if submitted.get("executor") == "local":
        from mtlaunch.launcher import local

        asked = local.cancel(run)
        say(f"{job_id}: asked to end" if asked else f"{job_id} has ended already")
        return
    from mtlaunch.launcher import slurm

    try:
        slurm.attach(run, job_id, str(submitted.get("cluster") or "")).cancel()
    except slurm.SchedulerError as error:
        raise SubmissionError(states.EXIT_SCHEDULER, str(error)) from error
    say(f"{job_id}: asked to end")


def refresh_report(run: RunDir, state: JobState | None = None) -> dict[str, Any]:
    """Rebuild the report from the records with the scheduler's word, and keep it when final."""
    state = state or job_state(run)
    word = {} if state.state == "UNKNOWN" else state.to_json()
    content = build(run.path, {"id": run.job_id, **word})
    if state.final:
        try:
            write_json(run.path / "report.json", content)
        except OSError as error:
            say(f"warning: report.json not written: {error}")
    return content


def wait(run: RunDir) -> int:
    """Follow a job to its end, print its report, return its exit code. Ctrl-C leaves the job."""
    job_id = str(run.job_id)
    watch = Watch(run, say)
    try:
        last = run.launch.get("world_size", 1) - 1
        for line in follow_log(run.log(job_id), watch.ended, _LOG_POLL_S):
            if _worth_showing(line, last):
                say(line)
    except KeyboardInterrupt:
        say(f"\njob {job_id} goes on; mtlaunch report {job_id} when it has ended")
        return states.EXIT_INTERRUPTED
    content = refresh_report(run, watch.state)
    show.report(show.Printer(sys.stderr), content)
    if (run.path / "report.json").is_file():  # a full disk has been warned of
        say(f"report: {run.path / 'report.json'}")
    return states.exit_code_of(watch.state, content)


def _worth_showing(line: str, last: int) -> bool:
    """The script's own lines, rank 0's and the last rank's, which prints Megatron-LM's losses.

    The log has those of the other ranks. With torchrun a label is an agent's, not a rank's.
    """
    label = re.match(r"\s*(\d+): ", line)
    return label is None or int(label[1]) in (0, last)


class Watch:
    """Polls a job's state, the less often the longer it stays as it is; tells of its changes."""

    def __init__(self, run: RunDir, tell: Callable[[str], None] | None = None) -> None:
        self._run, self._tell = run, tell
        self._ask = _asker(run)
        local = run.submission.get("executor") == "local"
        self._first_s, self._most_s = _LOCAL_POLL_S if local else _SLURM_POLL_S
        self._every_s = self._first_s
        self.state = JobState("PENDING")
        self._asked = float("-inf")
        self._shown = ""
        self._known = time.monotonic()

    def ended(self) -> bool:
        now = time.monotonic()
        if now - self._asked >= self._every_s:
            self._take(self._ask(), now)
            self._asked = time.monotonic()
        return self.state.final

    def _take(self, state: JobState, now: float) -> None:
        if state.state != "UNKNOWN":
            self.state, self._known = state, now
        elif now - self._known > _LOST_AFTER_S:
            raise SubmissionError(
                states.EXIT_UNAVAILABLE,
                f"no word of the job for {_LOST_AFTER_S:.0f} s: {state.reason}",
                f"mtlaunch report {self._run.path}",
            )
        words = self.state.state + (f" ({self.state.reason})" if self.state.reason else "")
        self._every_s = min(self._most_s, self._every_s * _POLL_GROWTH)
        if words != self._shown:
            self._shown, self._every_s = words, self._first_s
            if self._tell is not None:
                self._tell(f"job {self._run.job_id}: {words}")
