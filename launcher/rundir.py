"""The run directory: where a job's script, payload, records and report lie.

    <runs>/<name>/<run id>/     job.yaml job.sbatch estimate.json payload/ logs/ records/
                                status.json report.json
    <runs>/<name>/<job id>      a link to it, made after submission

An index in the user's state folder maps job ids and names to run directories.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtlaunch.launcher.runner.report import read_json, write_json
from mtlaunch.launcher.states import JobState
from mtlaunch.preflight import environment
from mtlaunch.preflight.plan import Plan, show_version


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run directory that exists. `made`: folders above it that were made for it, inner first."""

    path: Path
    made: tuple[Path, ...] = ()

    @property
    def script(self) -> Path:
        return self.path / "job.sbatch"

    @property
    def launch(self) -> dict[str, Any]:
        """What the ranks were given to run."""
        return read_json(self.path / "payload" / "launch.json") or {}

    @property
    def submission(self) -> dict[str, Any]:
        """How it was submitted: executor, job id, cluster."""
        return read_json(self.path / "submission.json") or {}

    @property
    def job_id(self) -> str | None:
        """By the submission, or by the job itself where sbatch did not name it."""
        status = read_json(self.path / "status.json") or {}
        found = self.submission.get("job_id") or status.get("job_id")
        return str(found) if found else None

    def ended_state(self) -> JobState | None:
        """How the job ended by its own last word; None before, or when it was killed."""
        status = read_json(self.path / "status.json") or {}
        started, ended = status.get("started_s"), status.get("ended_s")
        # the script may have been queued again by hand, under another id
        if ended is None or status.get("job_id") not in (None, self.job_id):
            return None
        elapsed_s = ended - started if started else None
        return JobState(str(status.get("state")), status.get("exit_code"), elapsed_s=elapsed_s)

    def log(self, job_id: str) -> Path:
        return self.path / "logs" / f"{job_id.removeprefix('local-')}.log"


def new_run_id() -> str:
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)


def default_runs(given: str | None) -> Path:
    return Path(given or os.environ.get("MTLAUNCH_RUNS") or "runs").absolute()


def launch_content(plan: Plan, ignored_rules: tuple[str, ...] = ()) -> dict[str, Any]:
    """What the rank runner reads: nothing secret, nothing that needs YAML."""
    lora = plan.lora
    return {
        "schema": "mtlaunch.launch/1",
        "name": plan.name,
        "entrypoint": plan.entrypoint,
        "entrypoint_is_module": plan.entrypoint_is_module,
        "args": list(plan.command_args),
        "environment": {one.name: one.value for one in environment.block(plan)},
        "secrets": list(plan.secrets),
        "lora": None
        if lora is None
        else {
            "dim": lora.dim,
            "alpha": lora.alpha,
            "dropout": lora.dropout,
            "target_modules": list(lora.target_modules),
            "sequence_parallel": lora.sequence_parallel,
        },
        "world_size": plan.world_size,
        "nodes": plan.nodes,
        "ranks_per_node": plan.ranks_per_node,
        "assumed_versions": {
            "megatron_core": show_version(plan.megatron_core),
            "torch": show_version(plan.torch) if plan.torch else None,
            "transformer_engine": show_version(plan.transformer_engine)
            if plan.transformer_engine
            else None,
        },
        "ignored_rules": list(ignored_rules),
    }


def create(
    path: Path,
    plan: Plan,
    script: str,
    job_yaml: str,
    estimate: Mapping[str, Any] | None,
    ignored_rules: tuple[str, ...] = (),
) -> RunDir:
    """Make a complete run directory. On an error nothing of it is left.

    Raises OSError.
    """
    above = (path.parent, path.parent.parent)
    run = RunDir(path, tuple(folder for folder in above if not folder.exists()))
    try:
        for folder in ("logs", "records", "payload/mtlaunch"):
            (path / folder).mkdir(parents=True)
        _copy_payload(path / "payload" / "mtlaunch")
        write_json(path / "payload" / "launch.json", launch_content(plan, ignored_rules))
        if estimate is not None:
            write_json(path / "estimate.json", estimate)
        (path / "job.yaml").write_text(job_yaml, encoding="utf-8")
        (path / "job.sbatch").write_text(script, encoding="utf-8")
        (path / "job.sbatch").chmod(0o755)
    except BaseException as error:
        remove(run)
        if isinstance(error, shutil.Error):  # of a whole tree: a list of (from, to, reason)
            raise OSError(error.args[0][0][2]) from error
        raise
    return run


def remove(run: RunDir) -> None:
    """Take back a run directory that was never submitted, and the folders made for it."""
    shutil.rmtree(run.path, ignore_errors=True)
    for folder in run.made:
        try:
            folder.rmdir()
        except OSError:
            break


def _copy_payload(target: Path) -> None:
    """What the ranks import: the runner and the kernels, nothing that needs a third package."""
    from mtlaunch import kernels, launcher

    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    # A package of its own: it comes before every installed mtlaunch, as a namespace it would not.
    (target / "__init__.py").write_text('"""What the ranks of this job import."""\n')
    source = Path(str(launcher.__file__)).parent
    shutil.copytree(source / "runner", target / "launcher" / "runner", ignore=ignore)
    for name in ("__init__.py", "version.py"):
        shutil.copy(source / name, target / "launcher" / name)
    shutil.copytree(Path(str(kernels.__file__)).parent, target / "kernels", ignore=ignore)


def link_job_id(run: RunDir, job_id: str) -> None:
    link = run.path.parent / job_id
    try:
        link.symlink_to(run.path.name)
    except FileExistsError:  # a job id of another cluster or of a Slurm set up anew
        link.unlink()
        link.symlink_to(run.path.name)


# -- index ---------------------------------------------------------------------------------------


def index_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "mtlaunch" / "index.jsonl"


def remember(run: RunDir, name: str, job_id: str, executor: str) -> None:
    """Append to the index. A line is short enough to be written in one piece."""
    path = index_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = {"job_id": job_id, "name": name, "executor": executor, "run_dir": str(run.path)}
    with path.open("a") as index:
        index.write(json.dumps({**entry, "submitted_s": time.time()}) + "\n")


def entries() -> Iterator[dict[str, Any]]:
    """Index entries, newest first."""
    try:
        lines = index_path().read_text().splitlines()
    except OSError:
        return
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            yield entry


def find(reference: str) -> RunDir | None:
    """A run by directory, job id or name (the newest of that name)."""
    path = Path(reference)
    if path.is_dir() and (path / "job.sbatch").exists():
        return RunDir(path.resolve())
    for entry in entries():
        if reference in (entry.get("job_id"), entry.get("name")):
            found = Path(str(entry.get("run_dir")))
            if found.is_dir():
                return RunDir(found)
    return None
