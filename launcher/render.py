"""Plan to script text: pure, no side effect, no Slurm."""

from __future__ import annotations

import re
import shlex
import traceback
from pathlib import Path
from typing import Any

import jinja2

from mtlaunch.launcher.runner.outcome import EXIT_NEAR_LIMIT
from mtlaunch.launcher.version import __version__
from mtlaunch.preflight import environment
from mtlaunch.preflight.plan import Plan

TEMPLATE = "job.sbatch.j2"

# The epilog's budget: below Slurm's KillWait of 30 s (slurm.conf), after which all is SIGKILLed.
EPILOG_SECONDS = 20

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]-]+")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_LINE_BREAKS = re.compile(r"[\n\r\0]")


class RenderError(ValueError):
    """A plan that this version cannot render, or a value no script can carry."""


def sbatch_value(value: Any) -> str:
    """A value for an #SBATCH line: sbatch knows quotes there, and expands nothing.

    >>> sbatch_value("my job"), sbatch_value("04:00:00")
    ('"my job"', '04:00:00')
    """
    text = str(value)
    if _LINE_BREAKS.search(text):
        raise RenderError(f"a line break cannot stand in an #SBATCH line: {text!r}")
    if _PLAIN.fullmatch(text):
        return text
    if '"' not in text and "\\" not in text:
        return f'"{text}"'
    if "'" not in text:
        return f"'{text}'"
    raise RenderError(f"sbatch cannot read a value with both kinds of quotes: {text}")


def quoted(value: Any) -> str:
    text = str(value)
    if _LINE_BREAKS.search(text):
        raise RenderError(f"a line break cannot stand in the job script: {text!r}")
    return shlex.quote(text)


def comment(value: Any) -> str:
    return " ".join(str(value).split())


def environment_for(template_dir: Path | None) -> jinja2.Environment:
    """Own templates before built-in ones; `builtin/...` always is ours, for `extends`."""
    builtin = jinja2.PackageLoader("mtlaunch.templates", "")
    loaders: list[jinja2.BaseLoader] = [jinja2.PrefixLoader({"builtin": builtin}), builtin]
    if template_dir is not None:
        loaders.insert(0, jinja2.FileSystemLoader(template_dir))
    env = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    env.filters.update(sh=quoted, sbatch=sbatch_value, comment=comment)
    return env


def tasks_per_node(plan: Plan) -> int:
    return 1 if plan.launcher == "torchrun" else plan.ranks_per_node


def sbatch_options(plan: Plan, run_dir: str) -> list[tuple[str, str | None]]:
    """Options of the #SBATCH lines: the job's own, and what the run directory needs."""
    own: dict[str, str | None] = {
        option: None if value is True else str(value) for option, value in plan.slurm.items()
    }
    for option, value in own.items():
        if not _OPTION.fullmatch(option):
            raise RenderError(f"slurm.{option!r} is not the name of an sbatch option")
        if value is not None and _LINE_BREAKS.search(value):
            raise RenderError(f"slurm.{option}: a line break cannot be rendered: {value!r}")
    own.setdefault("nodes", str(plan.nodes))
    own.pop("ntasks", None)  # the total follows from nodes and tasks a node, as resolve has read it
    own["ntasks-per-node"] = str(tasks_per_node(plan))
    if "signal" not in own and plan.warning_before_limit_s is not None:
        own["signal"] = f"B:USR1@{plan.warning_before_limit_s}"
    if "requeue" not in own and "no-requeue" not in own:
        own["no-requeue"] = None
    return [
        ("job-name", plan.name),
        *own.items(),
        ("output", run_dir.replace("%", "%%") + "/logs/%j.log"),
        ("open-mode", "append"),
    ]


def render(
    plan: Plan,
    run_dir: str,
    workdir: str | None = None,
    python: str | None = None,
    template_dir: Path | None = None,
) -> str:
    """The job script. Raises RenderError, also for what a template of the user gets wrong."""
    if plan.container is not None:
        raise RenderError("container: is checked but not yet rendered by this version")
    block = environment.block(plan)
    for variable in block:
        if variable.value is not None and _LINE_BREAKS.search(variable.value):
            raise RenderError(
                f"env.{variable.name}: a line break cannot be rendered: {variable.value!r}"
            )
    per_node = tasks_per_node(plan)
    values = {
        "plan": plan,
        "version": __version__,
        "run_dir": run_dir,
        "workdir": workdir or plan.workdir or ".",
        "python": plan.python or python or "python3",
        "sbatch": sbatch_options(plan, run_dir),
        "exports": [variable for variable in block if variable.value is not None],
        "unset": [variable for variable in block if variable.value is None],
        "tasks": plan.nodes * per_node,
        "tasks_per_node": per_node,
        "command": _command(plan),
        "epilog_seconds": EPILOG_SECONDS,
        "exit_near_limit": EXIT_NEAR_LIMIT,
    }
    try:
        return environment_for(template_dir).get_template(TEMPLATE).render(values)
    except RenderError:
        raise
    except Exception as error:  # whatever a template does wrong
        raise _template_error(error) from error


def _command(plan: Plan) -> str:
    """What a rank's runner starts, as one would type it."""
    head = ["-m", plan.entrypoint] if plan.entrypoint_is_module else [plan.entrypoint]
    return shlex.join(map(str, ["python", *head, *plan.command_args]))


def _template_error(error: Exception) -> RenderError:
    """What a template got wrong, and where: Jinja puts the template's frames into the traceback."""
    if isinstance(error, jinja2.TemplateNotFound):
        return RenderError(f"template {error.name}: not found")
    if isinstance(error, jinja2.TemplateSyntaxError):
        return RenderError(f"template {error.filename or error.name}:{error.lineno}: {error}")
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if not frame.filename.endswith(".py")]
    where = f"{ours[-1].filename}:{ours[-1].lineno}" if ours else TEMPLATE
    return RenderError(f"template {where}: {error}")
