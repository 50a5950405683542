"""Jobs on this machine: how they end, who can end them, and that nothing is left of them."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtlaunch.launcher import local, rundir
from mtlaunch.launcher.local_job import directives
from mtlaunch.launcher.processes import alive, descendants
from mtlaunch.launcher.runner.report import read_json, write_json

# Prints "ready" once all is set up, then sleeps.
SLEEPS = """\
import os, time
print("ready", os.getpid(), flush=True)
time.sleep(120)
"""

IGNORES_TERM = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPS

SAVES_ON_TERM = """\
import os, signal, sys, time
def save(number, frame):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", os.getpid(), flush=True)
while True:
    time.sleep(0.05)
"""

# Rank 1 fails once rank 0 runs.
FAILS_AS_RANK_1 = """\
import os, sys, time
if os.environ["RANK"] == "1":
    while not os.path.exists("rank 0 runs"):
        time.sleep(0.02)
    sys.exit(3)
open("rank 0 runs", "w").close()
time.sleep(60)
"""


def ready(home: Any, run: Any, log: Callable[..., str], count: int = 2) -> list[int]:
    """Pids of the scripts, once all of them run."""

    def found() -> list[str] | None:
        pids = re.findall(r"ready (\d+)", log(run))
        return pids if len(pids) == count else None

    deadline = time.monotonic() + 20
    while (pids := found()) is None:
        assert time.monotonic() < deadline, log(run) + str(home.state(run))
        time.sleep(0.02)
    return [int(pid) for pid in pids]


def supervisor_of(run: Any) -> int:
    return int((read_json(run.path / "local.json") or {})["pid"])


def run_in_new_process(home: Any, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mtlaunch.launcher", *words],
        cwd=home.path,
        capture_output=True,
        text=True,
        timeout=60,
    )


# -- how a job ends --------------------------------------------------------------------------------


def test_a_job_that_succeeds_is_reported_rank_by_rank(home: Any, log: Callable[..., str]) -> None:
    home.job("import os; print('trained by', os.environ['RANK'])", slurm={"ntasks_per_node": 3})
    code, run, done = home.submit_and_wait()
    assert code == 0, done.err
    assert re.fullmatch(r"local-\d+\n", done.out), "only the job id belongs on stdout"
    report = read_json(run.path / "report.json") or {}
    assert report["job"]["state"] == "COMPLETED"
    assert [row["rank"] for row in report["ranks"]] == [0, 1, 2]
    assert all(row["exit_code"] == 0 and row["peak_host_bytes"] > 2**20 for row in report["ranks"])
    assert all(row["complete"] for row in report["ranks"])
    assert (report["diagnosis"], report["first_failure"]) == ([], None)
    assert sorted(re.findall(r"(\d): trained by (\d)", log(run))) == [
        ("0", "0"),
        ("1", "1"),
        ("2", "2"),
    ]
    status = read_json(run.path / "status.json") or {}
    assert (status["state"], status["exit_code"]) == ("COMPLETED", 0)
    assert str(run.path / "report.json") in done.err
    assert re.search(r"\n +2 +\S+ .*MiB +0 +exited", done.err), done.err


def test_a_rank_that_exits_with_3_fails_the_job_and_is_named_first(home: Any) -> None:
    home.job(FAILS_AS_RANK_1)
    started = time.monotonic()
    code, run, done = home.submit_and_wait()
    assert code == 5
    assert time.monotonic() - started < 20, "the other rank was waited for"
    report = home.report(run)
    assert (report["job"]["state"], report["job"]["exit_code"]) == ("FAILED", 143)
    assert report["first_failure"]["rank"] == 1
    assert report["ranks"][1]["exit_code"] == 3
    assert report["ranks"][0]["signal"] == signal.SIGTERM
    assert [one["label"] for one in report["diagnosis"]] == ["task_failure"]
    assert "rank 1" in report["diagnosis"][0]["evidence"]
    assert "exited with 3" in done.err


def test_a_rank_that_is_killed_has_its_row_and_takes_the_others_along(
    home: Any, log: Callable[..., str]
) -> None:
    home.job(SLEEPS, slurm={"ntasks_per_node": 3})
    run = home.submit()
    pids = ready(home, run, log, 3)
    victim = pids[1]
    rank = re.search(rf"(\d): ready {victim}\b", log(run))
    assert rank is not None
    os.kill(victim, signal.SIGKILL)
    home.wait_for(run, "FAILED")
    report = home.report(run)
    row = report["ranks"][int(rank[1])]
    assert (row["signal"], row["exit_code"], row["ended"]) == (9, None, "killed by SIGKILL")
    assert row["peak_host_bytes"] > 2**20
    assert report["first_failure"]["rank"] == int(rank[1])
    assert not any(alive(pid, None) for pid in pids)


def test_a_process_that_a_rank_left_behind_is_ended_with_the_job(
    home: Any, log: Callable[..., str]
) -> None:
    home.job("""\
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                        start_new_session=True, stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL)
print("ready", left.pid, flush=True)
""")
    code, run, _ = home.submit_and_wait()
    assert code == 0
    pids = [int(pid) for pid in re.findall(r"ready (\d+)", log(run))]
    assert len(pids) == 2
    assert not any(alive(pid, None) for pid in pids)


def test_a_python_that_does_not_exist_fails_the_job_and_says_what_to_set(
    home: Any, log: Callable[..., str]
) -> None:
    home.job(python="/no/such/python")
    code, run, _ = home.submit_and_wait()
    assert code == 5
    assert "set python: in the job file" in log(run)
    report = home.report(run)
    assert report["job"]["exit_code"] == 127
    assert [row["ended"] for row in report["ranks"]] == ["no record", "no record"]
    assert report["diagnosis"] != []


def test_setup_lines_may_read_variables_that_are_not_set(
    home: Any, log: Callable[..., str]
) -> None:
    """As module and activate scripts do."""
    home.job(
        "import os; print(os.environ['FROM_SETUP'])",
        setup=['[ -n "$NO_SUCH_VARIABLE" ] || export FROM_SETUP=arrived'],
    )
    code, run, _ = home.submit_and_wait()
    assert (code, log(run).count("arrived\n")) == (0, 2), log(run)


def test_modules_in_the_working_folder_do_not_get_between_the_launcher_and_python(
    home: Any,
) -> None:
    (home.path / "modules").mkdir()
    for name in ("queue", "subprocess", "signal"):
        home.write(f"modules/{name}.py", f"raise SystemExit('the wrong {name}')")
    home.write("modules/train.py", "print('trained')")
    home.job("pass", workdir="modules")
    code, _, done = home.submit_and_wait()
    assert code == 0, done.err


# -- who can end it --------------------------------------------------------------------------------


def test_a_job_is_cancelled_from_another_process_and_nothing_runs_on(
    home: Any, log: Callable[..., str]
) -> None:
    home.job(SLEEPS)
    submitter = subprocess.Popen(
        [sys.executable, "-m", "mtlaunch.launcher", "submit", "job.yaml", "--executor", "local"]
        + ["--wait"],
        cwd=home.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert submitter.stdout is not None
    job_id = submitter.stdout.readline().strip()
    run = local_run(home, job_id)
    pids = ready(home, run, log)
    processes = [supervisor_of(run), *descendants(supervisor_of(run))]
    assert set(pids) < set(processes)
    assert run_in_new_process(home, "cancel", job_id).returncode == 0
    submitter.communicate(timeout=30)
    assert submitter.returncode == 7
    assert home.state(run)["state"] == "CANCELLED"
    assert not [pid for pid in processes if alive(pid, None)]
    report = home.report(run)
    assert report["first_failure"] is None
    assert [row["signal"] for row in report["ranks"]] == [15, 15]
    assert "CANCELLED" in report["diagnosis"][0]["evidence"]
    again = run_in_new_process(home, "cancel", job_id)
    assert (again.returncode, "has ended already" in again.stderr) == (0, True)


def local_run(home: Any, job_id: str) -> Any:
    found = rundir.find(job_id)
    assert found is not None, job_id
    return found


def test_a_job_is_cancelled_while_its_ranks_start(home: Any) -> None:
    home.job(SLEEPS)
    run = home.submit()
    home.run("cancel", str(run.path))
    assert home.wait_for(run, "CANCELLED", seconds=15)["elapsed_s"] < 12


def test_ranks_get_the_time_to_save_when_a_job_is_cancelled(
    home: Any, log: Callable[..., str]
) -> None:
    home.job(SAVES_ON_TERM)
    run = home.submit()
    ready(home, run, log)
    home.run("cancel", str(run.path))
    home.wait_for(run, "CANCELLED")
    assert log(run).count("saved") == 2


def test_ranks_that_ignore_term_are_killed_after_the_wait(
    home: Any, log: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "KILL_WAIT_S", 1)
    home.job(IGNORES_TERM)
    run = home.submit()
    pids = ready(home, run, log)
    asked = time.monotonic()
    home.run("cancel", str(run.path))
    home.wait_for(run, "CANCELLED")
    assert 1 <= time.monotonic() - asked < 10
    assert not any(alive(pid, None) for pid in pids)


def test_the_others_of_a_failed_rank_are_killed_when_they_ignore_term(
    home: Any, log: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "KILL_WAIT_S", 1)
    home.job("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAILS_AS_RANK_1)
    code, run, _ = home.submit_and_wait()
    assert code == 5
    report = home.report(run)
    assert report["first_failure"]["rank"] == 1
    # the process that would have recorded the end was killed as well, as at Slurm's KillWait
    assert report["ranks"][0]["ended"] == "killed: no end recorded"


# -- the time limit --------------------------------------------------------------------------------


def test_a_job_over_its_time_is_ended_and_exits_8(home: Any, log: Callable[..., str]) -> None:
    home.job(SLEEPS, slurm={"time": "00:00:02"})
    code, run, _ = home.submit_and_wait()
    assert code == 8
    report = home.report(run)
    assert report["job"]["state"] == "TIMEOUT"
    assert 2 <= report["job"]["elapsed_s"] < 10
    assert not any(alive(int(pid), None) for pid in re.findall(r"ready (\d+)", log(run)))


def test_the_warning_before_the_limit_lets_ranks_save_and_the_job_exits_85(
    home: Any, log: Callable[..., str]
) -> None:
    home.job(SAVES_ON_TERM, slurm={"time": "00:01:00", "signal": "B:USR1@58"})
    code, run, _ = home.submit_and_wait()
    assert code == 5
    assert log(run).count("saved") == 2
    report = home.report(run)
    assert (report["job"]["state"], report["job"]["exit_code"]) == ("FAILED", 85)
    assert [row["exit_code"] for row in report["ranks"]] == [0, 0]


# -- it outlives those who started it --------------------------------------------------------------


def test_a_job_survives_the_terminal_that_submitted_it(home: Any, log: Callable[..., str]) -> None:
    home.job("import time; time.sleep(1.5); print('trained')")
    words = [sys.executable, "-m", "mtlaunch.launcher", "submit", "job.yaml"]
    words += ["--executor", "local", "--wait"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, words)
    try:
        seen = b""
        while b"local-" not in seen:
            seen += os.read(terminal, 4096)
        job = re.search(rb"local-\d+", seen)
        assert job is not None
    finally:
        os.close(terminal)  # hangs up: SIGHUP to the session
        os.kill(pid, signal.SIGHUP)
        os.waitpid(pid, 0)
    run = local_run(home, job[0].decode())
    assert os.getsid(supervisor_of(run)) == supervisor_of(run)
    home.wait_for(run, "COMPLETED")
    assert log(run).count("trained") == 2


def test_a_job_is_found_again_by_id_name_and_folder_from_a_new_process(home: Any) -> None:
    home.job("print('trained')")
    _, run, done = home.submit_and_wait()
    job_id = done.out.strip()
    state = run_in_new_process(home, "status", job_id)
    assert state.stdout.split()[:2] == [job_id, "COMPLETED"]
    assert home.run("logs", job_id).out.count("trained") == 2
    for reference in (job_id, "probe", str(run.path), f"runs/probe/{job_id}"):
        report = home.run("report", reference, "--format", "json").json
        assert report["job"]["id"] == job_id
    assert home.run("report", job_id).out.count("exited") == 2
    assert home.run("status", "local-1").code == 2


def test_logs_follow_a_job_to_its_end(home: Any) -> None:
    home.job(
        "import time\nfor n in range(4):\n    print('step', n, flush=True)\n    time.sleep(.2)"
    )
    run = home.submit()
    followed = home.run("logs", "-f", str(run.path))
    assert followed.out.count("step 3") == 2
    assert home.state(run)["state"] == "COMPLETED"


def test_a_report_is_rebuilt_after_it_was_lost(home: Any) -> None:
    home.job("pass")
    _, run, _ = home.submit_and_wait()
    kept = read_json(run.path / "report.json") or {}
    for name in ("report.json", "status.json"):
        (run.path / name).unlink()
    report = home.report(run)
    assert report["ranks"] == kept["ranks"]
    assert report["job"]["state"] == "COMPLETED"


def test_without_its_supervisor_a_job_ends_and_does_not_count_as_running(
    home: Any, log: Callable[..., str], wait_until: Callable[..., Any]
) -> None:
    home.job(SLEEPS)
    run = home.submit()
    ready(home, run, log)
    supervisor = supervisor_of(run)
    processes = descendants(supervisor)
    assert len(processes) >= 6, "script, srun, two ranks of two processes"
    os.kill(supervisor, signal.SIGKILL)
    state = home.wait_for(run, "FAILED")
    assert "supervisor" in state["reason"]
    wait_until(lambda: not [pid for pid in processes if alive(pid, None)], "end of all processes")
    assert home.report(run)["diagnosis"] != []
    assert "has ended already" in home.run("cancel", str(run.path)).err


def test_a_number_that_another_process_got_meanwhile_is_not_taken_for_the_job(home: Any) -> None:
    home.job("pass")
    _, run, _ = home.submit_and_wait()
    state = {**(read_json(run.path / "local.json") or {}), "state": "RUNNING", "pid": os.getpid()}
    write_json(run.path / "local.json", state)
    assert home.state(run)["state"] == "FAILED"


def test_without_its_supervisor_no_worker_of_torchrun_goes_on(
    home: Any, log: Callable[..., str], wait_until: Callable[..., Any]
) -> None:
    """torchrun starts its workers without a word on what becomes of them when it is killed."""
    pytest.importorskip("torch")
    slurm = {"ntasks_per_node": None, "gpus_per_node": 2}
    home.job(SLEEPS, launcher="torchrun", python=sys.executable, slurm=slurm)
    run = home.submit()
    wait_until(lambda: log(run).count("ready") == 2, "two ranks", 60)
    processes = descendants(supervisor_of(run))
    assert len(processes) >= 7, "script, srun, agent, two ranks of two processes"
    os.kill(supervisor_of(run), signal.SIGKILL)
    try:
        wait_until(lambda: not [pid for pid in processes if alive(pid, None)], "their end", 10)
    finally:
        for pid in processes:
            if alive(pid, None):
                os.kill(pid, signal.SIGKILL)


def test_a_job_that_ends_between_two_looks_has_not_lost_its_supervisor(
    home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.job("pass")
    _, run, _ = home.submit_and_wait()
    ended = read_json(run.path / "local.json") or {}
    write_json(run.path / "local.json", {**ended, "state": "RUNNING"})

    def ends_now(pid: int, ticks: int | None) -> bool:
        write_json(run.path / "local.json", ended)
        return False

    monkeypatch.setattr(local, "alive", ends_now)
    assert home.state(run)["state"] == "COMPLETED"


# -- what cannot run here --------------------------------------------------------------------------


def test_two_nodes_are_refused_with_what_to_do_and_leave_nothing(home: Any) -> None:
    home.job("pass", slurm={"nodes": 2})
    before = home.everything()
    done = home.run("submit", "job.yaml", "--executor", "local")
    assert (done.code, done.out) == (69, "")
    assert "set slurm.nodes=1" in done.err
    assert home.everything() == before
    assert not (home.path.parent / "state").exists()


@pytest.mark.parametrize(
    "error, code", [(KeyboardInterrupt(), 130), (OSError(12, "no memory"), 69)]
)
def test_a_start_that_is_broken_off_leaves_nothing(
    home: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def broken(*_: Any) -> bool:
        raise error

    home.job(SLEEPS)
    before = home.everything()
    monkeypatch.setattr(local, "_started", broken)
    done = home.run("submit", "job.yaml", "--executor", "local")
    assert (done.code, done.out) == (code, "")
    assert home.everything() == before


# -- the directives --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, expected",
    [
        ("#SBATCH --time=01:00:00", {"time": "01:00:00"}),
        ('#SBATCH --comment="a b"', {"comment": "a b"}),
        ("#SBATCH --comment='it is \"x\"'", {"comment": 'it is "x"'}),
        ("#SBATCH --no-requeue", {"no-requeue": ""}),
        ("#SBATCH --time=5 # short", {"time": "5"}),
        ("echo start\n#SBATCH --time=5", {}),
        ("# a comment\n\n#SBATCH --time=5", {"time": "5"}),
    ],
)
def test_directives_are_read_as_sbatch_reads_them(line: str, expected: dict[str, str]) -> None:
    assert directives(f"#!/bin/bash\n{line}\n") == expected


def test_a_process_with_a_name_that_is_no_text_does_not_stop_the_search(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/sl\xe9\xe9p"
    os.symlink(b"/bin/sleep", path)
    process = subprocess.Popen([path, b"30"])
    try:
        deadline = time.monotonic() + 5
        while process.pid not in descendants(os.getpid()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.pid in descendants(os.getpid())
        assert alive(process.pid, None)
    finally:
        process.kill()
        process.wait()


def test_wait_shows_the_first_and_the_last_rank(home: Any) -> None:
    home.job(
        "import os; print('iteration of rank', os.environ['RANK'])", slurm={"ntasks_per_node": 3}
    )
    code, _, done = home.submit_and_wait()
    assert code == 0
    assert "iteration of rank 0" in done.err and "iteration of rank 2" in done.err
    assert "iteration of rank 1" not in done.err, "thousands of ranks would drown the rest"
