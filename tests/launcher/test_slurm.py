"""The Slurm executor against commands that misbehave as the real ones cannot be made to.

How it works with a real Slurm is in tests/slurm.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mtlaunch.launcher import slurm, submission
from mtlaunch.launcher.rundir import RunDir
from mtlaunch.launcher.runner.report import read_json, write_json
from mtlaunch.launcher.states import JobState

UP = "echo 'Slurmctld(primary) at head is UP'"
FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
NO_ANSWER = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
NO_ROWS = "echo 'JobID|State|NodeList|ExitCode|DerivedExitCode|ElapsedRaw|Reason'"


@dataclass
class FakeSlurm:
    """Shell scripts instead of Slurm's commands, the only ones on PATH, and their calls."""

    folder: Path
    called: Path

    def command(self, name: str, body: str) -> None:
        path = self.folder / name
        # SLURM_CLUSTERS would send scontrol and scancel to another cluster
        record = f'echo "{name} $*${{SLURM_CLUSTERS:+ ON $SLURM_CLUSTERS}}" >> {self.called}'
        path.write_text(f"#!/bin/sh\n{record}\n{body}\n")
        path.chmod(0o755)

    def answer(self, text: str) -> None:
        """What sbatch says of the job that it queued."""
        self.command("sbatch", f"printf %s {shlex.quote(text)}")

    def controller(self, show: str) -> None:
        self.command("scontrol", f'case "$*" in ping) {UP};; *) {show};; esac')

    def shows(self, state: str, **fields: str) -> None:
        fields = {"JobState": state, "Reason": "None", "ExitCode": "0:0", **fields}
        words = " ".join(f"{name}={value}" for name, value in fields.items())
        self.controller(f"echo JobId=12 JobName=probe {shlex.quote(words)}")

    def accounting(self, *states: str) -> None:
        rows = "".join(f"; echo '12|{state}|n1|0:0|0:0|60|None'" for state in states)
        self.command("sacct", NO_ROWS + rows)

    def calls(self) -> list[str]:
        return self.called.read_text().splitlines() if self.called.exists() else []


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    slurm._watcher.cache_clear()  # of the job 12 of another test
    made = FakeSlurm(folder, tmp_path / "called")
    made.answer("12\n")
    made.shows("PENDING")
    made.accounting()
    for name in ("srun", "scancel"):
        made.command(name, "")
    return made


def submit(home: Any) -> Any:
    home.job("pass")
    return home.run("submit", "job.yaml", "--executor", "slurm")


def queued(home: Any) -> RunDir:
    """The run directory of job 12."""
    done = submit(home)
    assert (done.code, done.out) == (0, "12\n"), done.err
    [path] = home.run_dirs()
    return RunDir(path)


def ends(run: RunDir, state: str = "COMPLETED", **fields: Any) -> None:
    """What the job's epilog leaves."""
    status = {"job_id": "12", "state": state, "exit_code": 0, "started_s": 100.0, "ended_s": 107.5}
    write_json(run.path / "status.json", {**status, **fields})


# -- what sbatch answers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer, cluster",
    [
        ("12\n", None),
        ("12;west\n", "west"),
        ("12;\n", None),
        ("Submitted batch job 12\n", None),
        ("Submitted batch job 12 on cluster west\n", "west"),
        ("quota: 3 of 9 jobs\n7\n12\n", None),
        ("sbatch: account 4711 charged\nSubmitted batch job 12\nthank you, 99\n", None),
        ("\x1b[32mSubmitted batch job 12\x1b[0m\n", None),
    ],
)
def test_the_id_is_found_in_whatever_sbatch_answers(
    home: Any, fake: FakeSlurm, answer: str, cluster: str | None
) -> None:
    fake.answer(answer)
    run = queued(home)
    assert run.submission["job_id"] == "12"
    assert run.submission.get("cluster") == cluster
    assert (home.runs / "probe" / "12").resolve() == run.path


def test_an_answer_that_is_no_utf8_does_not_lose_the_job(home: Any, fake: FakeSlurm) -> None:
    fake.command("sbatch", r"printf 'compte v\351rifi\351\n12\n'")
    assert queued(home).path.is_dir()


def test_a_job_without_a_known_id_keeps_its_run_directory(home: Any, fake: FakeSlurm) -> None:
    fake.answer("your request was taken\n")
    done = submit(home)
    assert (done.code, done.out) == (4, "")
    for said in ("a job WAS queued", "your request was taken", "squeue --me --name=probe"):
        assert said in done.err
    [path] = home.run_dirs()
    assert str(path) in done.err
    assert home.run("status", str(path)).out.split()[:2] == ["None", "UNKNOWN"]
    assert home.run("cancel", str(path)).code == 4
    # the job knows its own id, once it has started
    write_json(path / "status.json", {"job_id": "12", "state": "RUNNING", "started_s": 1.0})
    fake.shows("RUNNING")
    assert home.run("status", str(path)).out.split()[:2] == ["12", "RUNNING"]


@pytest.mark.parametrize("body, said", [("kill -9 $$", "signal 9"), ("kill -2 $$", "signal 2")])
def test_an_sbatch_that_was_killed_may_have_queued_the_job(
    home: Any, fake: FakeSlurm, body: str, said: str
) -> None:
    fake.command("sbatch", body)
    done = submit(home)
    assert (done.code, said in done.err) == (4, True), done.err
    assert len(home.run_dirs()) == 1


def test_an_interrupted_sbatch_may_have_queued_the_job(
    home: Any, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = slurm._run

    def interrupted(command: list[str], *rest: Any, **options: Any) -> Any:
        if command[0] == "sbatch":
            raise KeyboardInterrupt
        return run(command, *rest, **options)

    monkeypatch.setattr(slurm, "_run", interrupted)
    done = submit(home)
    [path] = home.run_dirs()
    assert (done.code, f"{path} is kept" in done.err) == (130, True)


def test_what_sbatch_refuses_is_said_once_and_leaves_nothing(home: Any, fake: FakeSlurm) -> None:
    fake.command("sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    home.job("pass")
    before = home.everything()
    done = submit(home)
    assert (done.code, done.out) == (4, "")
    assert done.err.count("invalid partition") == 1
    assert home.everything() == before


# -- before sbatch ---------------------------------------------------------------------------------


def test_a_login_node_without_srun_has_no_slurm_and_it_says_what_is_missing(
    home: Any, fake: FakeSlurm
) -> None:
    (fake.folder / "srun").unlink()
    home.job("pass")
    before = home.everything()
    done = home.run("submit", "job.yaml", "--executor", "slurm")
    assert (done.code, done.out) == (69, "")
    assert "not on PATH: srun\n" in done.err
    assert home.everything() == before


def test_an_error_before_sbatch_leaves_no_run_directory(
    home: Any, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("Could not detect srun")

    monkeypatch.setattr(slurm.Executor, "__init__", broken)
    home.job("pass")
    before = home.everything()
    assert submit(home).code == 70
    assert home.everything() == before
    assert not [call for call in fake.calls() if call.startswith("sbatch")]


# -- the state of a job ----------------------------------------------------------------------------


def test_a_job_that_is_queued_again_is_not_over_because_accounting_says_so(
    home: Any, fake: FakeSlurm
) -> None:
    run = queued(home)
    ends(run, "FAILED", exit_code=143)
    fake.shows("PENDING", Reason="BeginTime")
    fake.accounting("NODE_FAIL")
    state = home.state(run)
    assert (state["state"], state["reason"]) == ("PENDING", "BeginTime")


def test_one_command_asks_for_the_state(home: Any, fake: FakeSlurm) -> None:
    run = queued(home)
    asked = len(fake.calls())
    for _ in range(3):
        home.state(run)
    assert fake.calls()[asked:] == ["scontrol show job --oneliner 12"] * 3


def test_a_job_that_the_controller_forgot_is_accountings(home: Any, fake: FakeSlurm) -> None:
    run = queued(home)
    ends(run, "FAILED", exit_code=143)
    fake.controller(FORGOTTEN)
    fake.accounting("CANCELLED by 0")
    assert home.state(run)["state"] == "CANCELLED"


def test_text_of_the_user_is_not_taken_for_the_state(home: Any, fake: FakeSlurm) -> None:
    run = queued(home)
    fake.shows("RUNNING", Comment="my JobState=FAILED")
    assert home.state(run)["state"] == "RUNNING"


@pytest.mark.parametrize("rows", [(), ("RUNNING",), ("PENDING",)], ids=str)
def test_a_forgotten_job_has_ended_as_its_run_directory_says(
    home: Any, fake: FakeSlurm, rows: tuple[str, ...]
) -> None:
    run = queued(home)
    (run.path / "logs" / "12.log").write_text("0: trained\n")
    ends(run, "FAILED", exit_code=3)
    fake.controller(FORGOTTEN)
    fake.accounting(*rows)
    state = home.state(run)
    assert (state["state"], state["exit_code"], state["elapsed_s"]) == ("FAILED", 3, 7.5)
    started = time.monotonic()
    followed = home.run("logs", "-f", "12")
    assert (followed.code, followed.out) == (0, "0: trained\n")
    assert time.monotonic() - started < 5
    assert home.report(run)["job"]["state"] == "FAILED"


def test_the_end_of_another_job_in_the_same_folder_does_not_count(
    home: Any, fake: FakeSlurm
) -> None:
    run = queued(home)
    ends(run, job_id="11")
    fake.controller(FORGOTTEN)
    assert home.state(run)["state"] == "UNKNOWN"


def test_a_controller_that_does_not_answer_has_not_forgotten_the_job(
    home: Any, fake: FakeSlurm
) -> None:
    run = queued(home)
    ends(run)
    fake.controller(NO_ANSWER)
    fake.accounting("NODE_FAIL")
    state = home.state(run)
    assert state["state"] == "UNKNOWN"
    assert "Unable to contact slurm controller" in state["reason"]


def test_where_there_is_no_slurm_the_run_directory_is_all_there_is(
    home: Any, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = queued(home)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert home.state(run)["state"] == "UNKNOWN"
    ends(run)
    assert home.state(run)["state"] == "COMPLETED"


# -- how often it is asked for ---------------------------------------------------------------------


@pytest.fixture
def asked_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[RunDir, list[str]], list[float]]:
    """When a watch asks, on a clock that goes on by a tenth of a second at each look."""

    def watch(run: RunDir, states: list[str]) -> list[float]:
        now = 0.0
        times = []

        def ask() -> JobState:
            times.append(now)
            return JobState(states[min(len(times), len(states)) - 1])

        monkeypatch.setattr(submission, "_asker", lambda run: ask)
        monkeypatch.setattr(submission.time, "monotonic", lambda: now)
        watch = submission.Watch(run)
        while not watch.ended():
            now = round(now + 0.1, 1)
        return times

    return watch


def test_slurm_is_asked_less_and_less_often(home: Any, fake: FakeSlurm, asked_at: Any) -> None:
    times = asked_at(queued(home), ["PENDING"] * 15 + ["RUNNING"] * 2 + ["COMPLETED"])
    gaps = [round(after - before, 1) for before, after in zip(times, times[1:], strict=False)]
    assert gaps[0] == 0.5
    assert gaps[:14] == sorted(gaps[:14])
    assert gaps[13:15] == [10.0, 10.0]
    assert gaps[15] == 0.5, "a change is the time to look closely"


def test_a_local_job_is_asked_for_quickly_all_the_time(home: Any, asked_at: Any) -> None:
    home.job("pass")
    run = home.submit()
    times = asked_at(run, ["RUNNING"] * 50 + ["COMPLETED"])
    assert times[-1] < 50 * 0.35


def test_wait_and_logs_ask_the_controller_only(home: Any, fake: FakeSlurm) -> None:
    run = queued(home)
    ends(run)
    fake.shows("COMPLETED")
    asked = len(fake.calls())
    assert home.run("logs", "-f", "12").code == 0
    assert fake.calls()[asked:] == ["scontrol show job --oneliner 12"]


# -- another cluster -------------------------------------------------------------------------------


def test_a_job_of_another_cluster_is_never_looked_up_or_cancelled_here(
    home: Any, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.answer("12;west\n")
    run = queued(home)
    monkeypatch.setenv("SLURM_CLUSTERS", "south")
    fake.controller(FORGOTTEN)
    fake.accounting("COMPLETED")
    asked = len(fake.calls())
    assert home.state(run)["state"] == "COMPLETED"
    assert home.run("cancel", "12").code == 0
    calls = fake.calls()[asked:]
    assert [call.split()[0] for call in calls] == ["scontrol", "sacct", "scancel"]
    assert all(" -M west" in call for call in calls)
    assert not [call for call in calls if call.startswith("sc") and "south" in call]


def test_a_lost_job_of_another_cluster_is_not_looked_up_here(home: Any, fake: FakeSlurm) -> None:
    fake.answer("taken\n")
    home.job("pass", slurm={"clusters": "west"})
    assert home.run("submit", "job.yaml", "--executor", "slurm").code == 4
    [path] = home.run_dirs()
    write_json(path / "status.json", {"job_id": "12", "state": "RUNNING", "started_s": 1.0})
    home.run("status", str(path))
    assert fake.calls()[-1] == "scontrol -M west show job --oneliner 12"


def test_a_cancel_that_slurm_refuses_is_exit_4(home: Any, fake: FakeSlurm) -> None:
    queued(home)
    fake.command("scancel", "echo 'scancel: error: Access denied' >&2; exit 1")
    done = home.run("cancel", "12")
    assert (done.code, "Access denied" in done.err) == (4, True)
    (fake.folder / "scancel").unlink()
    assert home.run("cancel", "12").code == 4


# -- the end of a wait -----------------------------------------------------------------------------


def test_wait_names_no_report_that_is_not_there(
    home: Any, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = queued(home)
    fake.shows("COMPLETED")
    write = submission.write_json

    def no_space(path: Path, content: Any) -> None:
        if path.name == "report.json":
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(submission, "write_json", no_space)
    assert submission.wait(run) == 0
    said = home.capsys.readouterr().err
    assert "No space left on device" in said
    assert "report: " not in said
    assert read_json(run.path / "report.json") is None
