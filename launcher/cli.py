"""The command line. Each command imports what it needs, so that `check` stays fast."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from mtlaunch.launcher import states
from mtlaunch.launcher.version import __version__

if TYPE_CHECKING:
    from mtlaunch.launcher.rundir import RunDir
    from mtlaunch.preflight.jobfile import Job
    from mtlaunch.preflight.plan import Plan

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="mtlaunch")
def cli() -> None:
    """Launch Megatron training on Slurm, and keep jobs that would fail out of the queue.

    \b
    mtlaunch init                      write a commented job.yaml
    mtlaunch check job.yaml            rules and memory, in a fraction of a second
    mtlaunch submit job.yaml --wait    check, render, queue, report every rank's peak

    Exit codes: 0 fine, 1 refused, 2 usage or unreadable job file, 4 the scheduler refused,
    with --wait 5 failed, 6 out of memory, 7 cancelled, 8 timed out, 9 node failure,
    69 no executor, 70 a bug in mtlaunch, 130 interrupted.
    """


def main() -> None:
    """Entry point: a bug is exit 70 and says what to send, never a bare traceback."""
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        _show_usage_error(error)
        sys.exit(states.EXIT_USAGE)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(states.EXIT_INTERRUPTED)
    except BrokenPipeError:  # `mtlaunch ... | head`
        sys.stderr.close()
        sys.exit(states.EXIT_OK)
    except Exception:
        import traceback

        traceback.print_exc()
        click.echo(f"a bug in mtlaunch {__version__}: please report the lines above", err=True)
        sys.exit(states.EXIT_BUG)


def _show_usage_error(error: click.ClickException) -> None:
    """Words, or the document of the command's schema: its options were not parsed to the end."""
    if not _json_is_asked(sys.argv[1:]):
        error.show()
        return
    context = getattr(error, "ctx", None)
    in_command = context is not None and context.parent is not None
    name = context.info_name if in_command and context is not None else "error"
    hint = f"mtlaunch {name} --help" if in_command else "mtlaunch --help"
    emit(_error_document(f"mtlaunch.{name}/1", error.format_message(), hint))


def _json_is_asked(words: list[str]) -> bool:
    return "--format=json" in words or ("--format", "json") in zip(words, words[1:], strict=False)


# -- options that several commands share -----------------------------------------------------------

_Command = Callable[..., Any]

set_option = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change one value of the job file: --set slurm.nodes=8 --set args.seq-length=8192.",
)
format_option = click.option(
    "--format", "format_", type=click.Choice(["text", "json"]), default="text", show_default=True
)
template_option = click.option(
    "--template-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Own templates, found before the built-in job.sbatch.j2 (which is builtin/job.sbatch.j2).",
)
runs_option = click.option(
    "--runs",
    metavar="DIR",
    help="Where run directories go.  [default: $MTLAUNCH_RUNS, else ./runs]",
)


def job_argument(command: _Command) -> _Command:
    return click.argument("file", metavar="JOB")(command)


def emit(document: Any) -> None:
    click.echo(json.dumps(document, allow_nan=False))


def read_plan(file: str, assignments: tuple[str, ...]) -> tuple[Job, Plan]:
    """Raises JobFileError."""
    from mtlaunch.preflight.resolve import load
    from mtlaunch.preflight.yaml_text import JobFileError, Place, Problem

    try:
        if file == "-":
            name, text = "<stdin>", sys.stdin.read()
        else:
            name, text = file, Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        words = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise JobFileError([Problem(f"cannot be read: {words}", Place(file))]) from error
    return load(text, name, assignments)


def plan_or_exit(
    file: str, assignments: tuple[str, ...], format_: str = "text", schema: str = ""
) -> tuple[Job, Plan]:
    """The job and its Plan, or exit code 2 with every problem shown."""
    from mtlaunch.preflight.yaml_text import JobFileError

    try:
        return read_plan(file, assignments)
    except JobFileError as error:
        _show_problems(error, format_, schema)
        sys.exit(states.EXIT_USAGE)


def _show_problems(error: Any, format_: str, schema: str) -> None:
    from mtlaunch.launcher import show
    from mtlaunch.preflight.verdict import error_json

    if format_ == "json":
        emit(error_json(schema, error))
    else:
        show.problems(show.Printer(sys.stderr), error)


def fail(
    code: int, message: str, hint: str = "", format_: str = "text", schema: str = ""
) -> NoReturn:
    """End with an error: a document on stdout with --format json, else words on stderr."""
    if format_ == "json":
        emit(_error_document(schema, message, hint))
        sys.exit(code)
    click.echo(f"mtlaunch: {message}" + (f"\n  fix: {hint}" if hint else ""), err=True)
    sys.exit(code)


def _error_document(schema: str, message: str, hint: str) -> dict[str, Any]:
    return {"schema": schema, "error": {"message": message, "hint": hint}}


def rule_ids(words: tuple[str, ...], families: bool, format_: str, schema: str) -> tuple[str, ...]:
    """Ids of --select and --ignore in their own case, or exit code 2 for what is none."""
    if not words:
        return ()
    from mtlaunch.preflight.jobfile import did_you_mean
    from mtlaunch.preflight.rule import FAMILIES, all_rules

    ids = [one.id for one in all_rules()]
    found = tuple(word.upper() for word in words)
    for word in found:
        if word in FAMILIES and not families:
            members = " ".join(f"--ignore {one}" for one in ids if one[:3] == word)
            message = f"{word} is a family of rules; submit ignores single ids only"
            fail(states.EXIT_USAGE, message, members, format_, schema)
        if word not in FAMILIES and word not in ids:
            known = [*ids, *(FAMILIES if families else ())]
            hint = did_you_mean(word, known, 0.5) or "mtlaunch rules lists all"
            fail(states.EXIT_USAGE, f"no rule {word}", hint, format_, schema)
    return tuple(dict.fromkeys(found))


# -- before the queue ------------------------------------------------------------------------------


@cli.command()
@click.argument("files", metavar="JOB...", nargs=-1, required=True)
@set_option
@format_option
@click.option("--select", "selected", multiple=True, metavar="ID", help="Only these.")
@click.option(
    "--ignore",
    "ignored",
    multiple=True,
    metavar="ID",
    help="Leave out a rule or a family: --ignore PIP003 --ignore MEM.",
)
def check(
    files: tuple[str, ...],
    assignments: tuple[str, ...],
    format_: str,
    selected: tuple[str, ...],
    ignored: tuple[str, ...],
) -> None:
    """Check job files against Megatron's rules and the GPU's memory. `-` reads stdin.

    \b
    mtlaunch check job.yaml
    mtlaunch check job.yaml --set args.tensor-model-parallel-size=8 --format json
    """
    from mtlaunch.launcher import show
    from mtlaunch.preflight.verdict import CHECK_SCHEMA
    from mtlaunch.preflight.verdict import check as run_check
    from mtlaunch.preflight.yaml_text import JobFileError

    selected = rule_ids(selected, True, format_, CHECK_SCHEMA)
    ignored = rule_ids(ignored, True, format_, CHECK_SCHEMA)
    code = states.EXIT_OK
    for file in files:
        try:
            job, plan = read_plan(file, assignments)
        except JobFileError as error:
            _show_problems(error, format_, CHECK_SCHEMA)
            code = max(code, states.EXIT_USAGE)
            continue
        verdict = run_check(plan, selected, ignored)
        if format_ == "json":
            emit(verdict.to_json())
        else:
            printer = show.Printer()
            show.findings(printer, verdict, job.document.source)
            show.verdict_lines(printer, verdict)
        code = max(code, states.EXIT_REFUSED if verdict.refused else states.EXIT_OK)
    sys.exit(code)


@cli.command()
@job_argument
@set_option
@format_option
def estimate(file: str, assignments: tuple[str, ...], format_: str) -> None:
    """Estimate the memory of every pipeline rank.

    \b
    mtlaunch estimate job.yaml --set args.micro-batch-size=2
    """
    from mtlaunch.launcher import show
    from mtlaunch.preflight.memory import estimate as run_estimate

    schema = "mtlaunch.estimate/1"
    _, plan = plan_or_exit(file, assignments, format_, schema)
    result = run_estimate(plan)
    if format_ == "json":
        emit(_unknown_estimate(plan, schema) if result is None else result.to_json())
    elif result is None:
        show.unknown_shape(show.Printer())
        hint = "give model:, or num-layers, hidden-size, vocab-size and seq-length in args"
        click.echo(f"  fix: {hint}", err=True)
    else:
        show.estimate(show.Printer(), result.to_json())


def _unknown_estimate(plan: Plan, schema: str) -> dict[str, Any]:
    """The estimate of a job whose model is not known: no rank, and why."""
    from mtlaunch.launcher.show import SHAPE_NOT_KNOWN

    capacity = None if plan.gpu is None else plan.gpu.capacity_bytes
    name = plan.gpu_name if plan.gpu is None else plan.gpu.name
    sizes = {one: getattr(plan, one) for one in ("tp", "pp", "cp", "ep", "etp", "dp", "edp")}
    return {
        "schema": schema,
        "gpu": None if name is None else {"name": name, "capacity_bytes": capacity},
        "world_size": plan.world_size,
        "parallel": {**sizes, "vpp": plan.vpp or 1},
        "ranks": [],
        "worst_pipeline_rank": None,
        "fits": "unknown",
        "assumptions": [],
        "not_modelled": [SHAPE_NOT_KNOWN],
    }


@cli.command()
@job_argument
@set_option
@format_option
def env(file: str, assignments: tuple[str, ...], format_: str) -> None:
    """Print the environment block with the reason of each variable."""
    from dataclasses import asdict

    from mtlaunch.launcher import show
    from mtlaunch.preflight import environment

    _, plan = plan_or_exit(file, assignments, format_, "mtlaunch.env/1")
    block = environment.block(plan)
    if format_ == "json":
        emit({"schema": "mtlaunch.env/1", "variables": [asdict(variable) for variable in block]})
    else:
        show.environment(show.Printer(), block)


@cli.command()
@job_argument
@set_option
@template_option
def render(file: str, assignments: tuple[str, ...], template_dir: Path | None) -> None:
    """Write the job script to stdout. Nothing else happens; no Slurm is needed.

    \b
    mtlaunch render job.yaml | less
    """
    from mtlaunch.launcher.render import RenderError
    from mtlaunch.launcher.render import render as render_script

    _, plan = plan_or_exit(file, assignments)
    try:
        text = render_script(plan, f"runs/{plan.name}/RUN_ID", template_dir=template_dir)
    except RenderError as error:
        fail(states.EXIT_USAGE, str(error))
    click.echo(text, nl=False)


@cli.command()
@click.argument("rule_id", metavar="ID")
def explain(rule_id: str) -> None:
    """Print the page of a rule.

    What it checks, why it fails, a bad and a good example.

    \b
    mtlaunch explain PIP001
    """
    import inspect

    from mtlaunch.preflight.jobfile import did_you_mean
    from mtlaunch.preflight.rule import all_rules

    known = {one.id: one for one in all_rules()}
    found = known.get(rule_id.upper())
    if found is None:
        hint = did_you_mean(rule_id.upper(), known, 0.5) or "mtlaunch rules lists all"
        fail(states.EXIT_USAGE, f"no rule {rule_id}", hint)
    click.echo(f"{found.id} {found.name} ({found.severity})\n\n{inspect.cleandoc(found.page)}")
    click.echo(f"\nSource\n    {found.source}")


@cli.command()
@format_option
def rules(format_: str) -> None:
    """List all rules."""
    from mtlaunch.preflight.rule import all_rules

    for one in all_rules():
        if format_ == "json":
            emit({"id": one.id, "name": one.name, "severity": one.severity, "source": one.source})
        else:
            click.echo(f"{one.id}  {one.severity:<8} {one.name}")


@cli.command()
@click.argument("path", default="job.yaml", metavar="[FILE]")
@click.option("--force", is_flag=True, help="Overwrite the file.")
def init(path: str, force: bool) -> None:
    """Write a commented job file to start from (default: job.yaml)."""
    from importlib.resources import files

    text = (files("mtlaunch.templates") / "job.yaml").read_text()
    try:
        with open(path, "w" if force else "x") as file:
            file.write(text)
    except FileExistsError:
        fail(states.EXIT_USAGE, f"{path} exists", "another name, or --force")
    except OSError as error:
        fail(states.EXIT_USAGE, f"{path}: {error.strerror}")
    click.echo(f"wrote {path}; next: mtlaunch check {path}", err=True)


@cli.command()
def schema() -> None:
    """Print the JSON Schema of job files, for editors."""
    from mtlaunch.preflight.jobfile import json_schema

    click.echo(json.dumps(json_schema(), indent=2))


@cli.command()
@format_option
def doctor(format_: str) -> None:
    """Say what this machine has.

    Slurm, GPUs, packages, and the variables of this shell that submission strips.
    """
    from mtlaunch.launcher.doctor import examine

    facts = examine()
    if format_ == "json":
        emit({"schema": "mtlaunch.doctor/1", **facts})
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name.replace('_', ' '):<{width}}  {value}")


# -- the job ---------------------------------------------------------------------------------------


@cli.command()
@job_argument
@set_option
@click.option(
    "--ignore",
    "ignored",
    multiple=True,
    metavar="ID",
    help="Submit although this rule refuses: --ignore PIP003. Recorded in the report.",
)
@template_option
@runs_option
@click.option(
    "--executor",
    type=click.Choice(["auto", "slurm", "local"]),
    default="auto",
    show_default=True,
    help="auto: Slurm when `scontrol ping` answers, else this machine.",
)
@click.option("--wait", is_flag=True, help="Wait for the end and print the report.")
@click.option("-n", "--dry-run", is_flag=True, help="Everything but queue.")
@format_option
def submit(
    file: str,
    assignments: tuple[str, ...],
    ignored: tuple[str, ...],
    template_dir: Path | None,
    runs: str | None,
    executor: str,
    wait: bool,
    dry_run: bool,
    format_: str,
) -> None:
    """Check, estimate, render and queue a job. A refused job leaves nothing behind.

    Only the job id goes to stdout. Ctrl-C with --wait leaves the job running.

    \b
    mtlaunch submit job.yaml
    mtlaunch submit job.yaml --wait --set slurm.time=00:30:00
    """
    from mtlaunch.launcher import submission

    ignored = rule_ids(ignored, False, format_, submission.SCHEMA)
    job, plan = plan_or_exit(file, assignments, format_, submission.SCHEMA)
    options = submission.Options(
        ignored=ignored,
        template_dir=template_dir,
        runs=runs,
        executor=executor,
        wait=wait,
        dry_run=dry_run,
        json=format_ == "json",
    )
    try:
        sys.exit(submission.submit(job, plan, options))
    except submission.SubmissionError as error:
        fail(error.exit_code, str(error), error.hint, format_, submission.SCHEMA)


def _run_or_exit(reference: str, format_: str = "text", schema: str = "") -> RunDir:
    from mtlaunch.launcher.rundir import find, index_path

    run = find(reference)
    if run is None:
        hint = f"a job id or name of {index_path()}, or a run directory"
        fail(states.EXIT_USAGE, f"no run '{reference}'", hint, format_, schema)
    return run


@cli.command()
@click.argument("reference", metavar="RUN")
@format_option
@click.option("--all", "all_ranks", is_flag=True, help="Every rank, however many.")
def report(reference: str, format_: str, all_ranks: bool) -> None:
    """Report every rank's peak memory and end.

    Beside the estimate, with a diagnosis when the job failed.

    RUN is a job id, a name, or a run directory. Rebuilt from the records each time.
    """
    from mtlaunch.launcher import show
    from mtlaunch.launcher.submission import refresh_report

    content = refresh_report(_run_or_exit(reference, format_, "mtlaunch.report/1"))
    if format_ == "json":
        emit(content)
    else:
        show.report(show.Printer(), content, all_ranks)


@cli.command()
@click.argument("reference", metavar="RUN")
@format_option
def status(reference: str, format_: str) -> None:
    """Say where a run stands."""
    from mtlaunch.launcher.submission import job_state

    run = _run_or_exit(reference, format_, "mtlaunch.status/1")
    state = job_state(run)
    job_id = run.job_id
    if format_ == "json":
        content = {"job_id": job_id, "run_dir": str(run.path), **state.to_json()}
        emit({"schema": "mtlaunch.status/1", **content, "reason": state.reason})
        return
    reason = f" ({state.reason})" if state.reason else ""
    click.echo(f"{job_id} {state.state}{reason} {run.path}")


@cli.command()
@click.argument("reference", metavar="RUN")
def cancel(reference: str) -> None:
    """Cancel a run: TERM to its ranks, KILL after Slurm's KillWait."""
    from mtlaunch.launcher import submission

    try:
        submission.cancel(_run_or_exit(reference))
    except submission.SubmissionError as error:
        fail(error.exit_code, str(error), error.hint)


@cli.command()
@click.argument("reference", metavar="RUN")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends; Ctrl-C leaves it.")
def logs(reference: str, follow: bool) -> None:
    """Print the log of a run."""
    from mtlaunch.launcher.submission import SubmissionError, Watch
    from mtlaunch.launcher.tail import follow_log

    run = _run_or_exit(reference)
    path = run.log(str(run.job_id))
    try:
        for line in follow_log(path, Watch(run).ended if follow else lambda: True):
            click.echo(line)
    except SubmissionError as error:
        fail(error.exit_code, str(error), error.hint)
