"""Fixtures for the launcher's tests: a folder of one's own, the command line, jobs, ranks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtlaunch.launcher import cli, rundir
from mtlaunch.launcher.processes import alive, descendants
from mtlaunch.launcher.rundir import RunDir
from mtlaunch.launcher.runner.record import read_file
from mtlaunch.launcher.runner.report import read_json
from mtlaunch.launcher.slurm_env import clean_environment
from mtlaunch.preflight.jobfile import parse
from mtlaunch.preflight.resolve import resolve


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 20) -> Any:
    """The first true value of `condition`; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    pytest.fail(f"not within {seconds} s: {what}")


@pytest.fixture(name="wait_until")
def wait_until_() -> Callable[..., Any]:
    return wait_until


# -- the command line ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class _Stdin(io.StringIO):
    def isatty(self) -> bool:
        return False


@dataclass
class Home:
    """A user's folder, with runs and state of its own, and the command line in it."""

    path: Path
    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    def run(self, *words: str, stdin: str = "") -> Done:
        """`mtlaunch WORDS`, in this process: the entry point, with its exit code."""
        self.capsys.readouterr()
        self.monkeypatch.setattr(sys, "argv", ["mtlaunch", *words])
        self.monkeypatch.setattr(sys, "stdin", _Stdin(stdin))
        try:
            cli.main()
            code: Any = 0
        except SystemExit as end:
            code = end.code
        out, err = self.capsys.readouterr()
        return Done(0 if code is None else code, out, err)

    def write(self, name: str, text: str) -> str:
        (self.path / name).write_text(text, encoding="utf-8")
        return name

    def job(self, script: str = "", file: str = "job.yaml", **content: Any) -> str:
        """A job file of two ranks without GPUs, and its script."""
        self.write("train.py", script)
        slurm = {"ntasks_per_node": 2, "time": "00:05:00", **content.pop("slurm", {})}
        job = {"name": "probe", "slurm": slurm, "entrypoint": "train.py", **content}
        return self.write(file, yaml.safe_dump(job, sort_keys=False))

    def run_dirs(self) -> list[Path]:
        return [path.parent.resolve() for path in self.runs.glob("*/2*/job.sbatch")]

    def everything(self) -> set[str]:
        return {str(path.relative_to(self.path)) for path in self.path.rglob("*")}

    # local jobs

    def submit(self, *words: str) -> RunDir:
        """Submit job.yaml to the local executor; the run directory of the job."""
        done = self.run("submit", "job.yaml", "--executor", "local", *words)
        assert done.code == 0, done.err
        found = rundir.find(done.out.strip())
        assert found is not None
        return found

    def submit_and_wait(self, *words: str) -> tuple[int, RunDir, Done]:
        """`submit --wait` of job.yaml: exit code, run directory, what was printed."""
        done = self.run("submit", "job.yaml", "--executor", "local", "--wait", *words)
        found = rundir.find(done.out.strip()) if done.out.strip() else None
        assert found is not None, done.err
        return done.code, found, done

    def state(self, run: RunDir) -> dict[str, Any]:
        state: dict[str, Any] = self.run("status", str(run.path), "--format", "json").json
        return state

    def wait_for(self, run: RunDir, *states: str, seconds: float = 20) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            state = self.state(run)
            return state if state["state"] in states else None

        state: dict[str, Any] = wait_until(reached, f"state {states}", seconds)
        return state

    def report(self, run: RunDir) -> dict[str, Any]:
        done = self.run("report", str(run.path), "--format", "json")
        assert done.code == 0, done.err
        report: dict[str, Any] = done.json
        return report


def log_of(run: RunDir) -> str:
    return "".join(path.read_text() for path in (run.path / "logs").glob("[0-9]*.log"))


@pytest.fixture
def log() -> Callable[[RunDir], str]:
    return log_of


@pytest.fixture
def home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Home]:
    """An empty folder to work in, in which nothing runs on after the test."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MTLAUNCH_RUNS", str(folder / "runs"))
    for name in set(os.environ) - set(clean_environment(os.environ)):
        monkeypatch.delenv(name)
    yield Home(folder, capsys, monkeypatch)
    for path in folder.glob("runs/*/2*/local.json"):
        local = read_json(path) or {}
        pid, ticks = local.get("pid"), local.get("start_ticks")
        if isinstance(pid, int) and pid != os.getpid() and alive(pid, ticks):
            for one in (pid, *descendants(pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)


# -- a single rank ---------------------------------------------------------------------------------


@dataclass
class Ranks:
    """Starts ranks the way the rendered script does, without a script."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def prepare(self, script: str, **content: Any) -> RunDir:
        """A run directory of a job whose entry point is `script`."""
        (self.folder / "train.py").write_text(script)
        job = {"slurm": {"ntasks_per_node": 2}, "entrypoint": "train.py", **content}
        plan = resolve(parse(yaml.safe_dump(job, sort_keys=False), str(self.folder / "job.yaml")))
        self.block = rundir.launch_content(plan)["environment"]
        return rundir.create(self.folder / "run", plan, "", "", None)

    def environment(self, **changes: str | None) -> dict[str, str]:
        """The environment that srun gives to rank 1 of 2, the block as rendered, then `changes`."""
        slurm = {
            "SLURM_JOB_ID": "7",
            "SLURM_PROCID": "1",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "0",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURMD_NODENAME": "n1",
        }
        environ: dict[str, str | None] = {**clean_environment(os.environ), **slurm}
        environ |= {**self.block, **changes}
        return {name: value for name, value in environ.items() if value is not None}

    def start(
        self, run: RunDir, environ: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        main = run.path / "payload" / "mtlaunch" / "launcher" / "runner" / "__main__.py"
        process = subprocess.Popen(
            [sys.executable, "-u", str(main), str(run.path)],
            env=self.environment() if environ is None else environ,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )
        self.started.append(process)
        return process

    def run(self, script: str, **content: Any) -> Done:
        """One rank of `script`, to its end."""
        return self.finish(self.start(self.prepare(script, **content)))

    def finish(self, process: subprocess.Popen[str]) -> Done:
        out, err = process.communicate(timeout=30)
        return Done(process.returncode, out, err)

    def record(self) -> Any:
        """The record of the one rank that ran."""
        [record] = read_file(self.folder / "run" / "records" / "0" / "n1.rec")
        return record


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    folder = tmp_path / "work"
    folder.mkdir()
    ranks = Ranks(folder)
    yield ranks
    for process in ranks.started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
