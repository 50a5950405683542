"""The report of a run: who failed first, and what the records leave open."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mtlaunch.launcher import render, show, states
from mtlaunch.launcher.runner import epilog, report
from mtlaunch.launcher.runner.record import Slot
from mtlaunch.launcher.runner.report import build, read_json, write_json

START = 1_000_000.0  # when the ranks of these runs started; times below are seconds after it

OUT_OF_MEMORY = {"error": "OutOfMemoryError: tried 2 GiB", "oom": True}


@dataclass
class Run:
    """A run directory, as the ranks leave it: a node for two ranks."""

    path: Path
    ranks: int = 2

    def __post_init__(self) -> None:
        (self.path / "payload").mkdir()
        launch = {"name": "probe", "world_size": self.ranks}
        (self.path / "payload" / "launch.json").write_text(json.dumps(launch))

    def rank(
        self,
        rank: int,
        last: float = 10,
        *,
        file: str = "",
        started: float = 0,
        error_at: float | None = None,
        term: float | None = None,
        ended: float | None = None,
        code: int | None = None,
        by: signal.Signals | None = None,
        **process: Any,
    ) -> None:
        """A record with the last sample at `last`; without `ended` nobody recorded an end."""
        node = f"n{rank // 2 + 1}"
        slot = Slot(self.path / "records" / "0" / f"{file or node}.rec", node, rank % 2, 2)
        process |= {"rank": rank, "node": node, "pid": 100 + rank, "phase": "running"}
        process |= {"started_s": START + started, "updated_s": START + last}
        if error_at is not None:
            process = {"error": "ValueError: bad", "error_s": START + error_at, **process}
        slot.process.write(process)
        end: dict[str, Any] = {"rank": rank, "local_rank": rank % 2, "pid": 100 + rank}
        if term is not None:
            end["term_s"] = START + term
        if ended is not None:
            end |= {"ended_s": START + ended, "exit_code": code, "signal": by}
        if len(end) > 3:
            slot.exit.write(end)

    def status(self, state: str = "FAILED", exit_code: int = 143, **more: Any) -> None:
        content = {"state": state, "exit_code": exit_code, "ended_s": START + 60, "attempt": 0}
        write_json(self.path / "status.json", {**content, **more})

    def report(self, state: str | None = None, exit_code: int | None = 143) -> dict[str, Any]:
        """With the scheduler's word, if there is one."""
        word = {"state": state, "exit_code": exit_code} if state else None
        return build(self.path, word)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def ended(content: dict[str, Any]) -> list[str]:
    return [row["ended"] for row in content["ranks"]]


def first(content: dict[str, Any]) -> int | None:
    return content["first_failure"] and content["first_failure"]["rank"]


def diagnosis(content: dict[str, Any]) -> tuple[str, str]:
    [only] = content["diagnosis"]
    return only["label"], only["evidence"]


def shown(content: dict[str, Any]) -> str:
    stream = io.StringIO()
    show.report(show.Printer(stream), content)
    return stream.getvalue()


# -- a rank of which both processes were killed ----------------------------------------------------


@pytest.mark.parametrize("word", ["FAILED", "OUT_OF_MEMORY", None])
def test_a_rank_killed_with_its_parent_is_the_first_failure(run: Run, word: str | None) -> None:
    """Its peer is ended by srun's TERM, and that end is recorded."""
    run.rank(0, 10.9, ended=11.2, by=signal.SIGTERM)
    run.rank(1, 10.4)
    if word is None:
        run.status()
    content = run.report(word)
    assert ended(content) == ["killed by SIGTERM", "killed: no end recorded"]
    assert [row["failed"] for row in content["ranks"]] == [True, True]
    assert content["summary"]["failed"] == 2
    assert content["first_failure"] == {"rank": 1, "node": "n1", "time": START + 10.4}
    label, evidence = diagnosis(content)
    assert label == "task_failure"
    assert "the whole rank was killed (SIGKILL) at most 0.8 s after its last record" in evidence


def test_ranks_killed_all_at_once_are_ordered_by_their_last_record(run: Run) -> None:
    run.rank(0, 10.9)
    run.rank(1, 10.4)
    content = run.report("FAILED", 137)
    assert first(content) == 1
    assert "SIGKILL" in diagnosis(content)[1] and "at its last record" in diagnosis(content)[1]


def test_a_peer_that_answers_term_with_an_exit_code_did_not_fail_first(run: Run) -> None:
    run.rank(0, 11, term=11.2, ended=11.3, code=1)  # the clock of its node may be behind as well
    run.rank(1, 12)
    assert first(run.report("FAILED")) == 1


def test_a_peer_killed_because_it_ignored_term_did_not_fail_first(run: Run) -> None:
    """It hung, so that its last record is older than the failure."""
    run.rank(0, 5, term=11.2)
    run.rank(1, 11, ended=11.1, code=3)
    content = run.report("FAILED")
    assert (first(content), ended(content)) == (1, ["killed: no end recorded", "exited"])


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING", "SUSPENDED"])
def test_a_running_job_has_running_ranks_and_no_exit_code(run: Run, state: str) -> None:
    run.rank(0)
    run.rank(1, term=9)
    content = run.report(state, 0)
    assert ended(content) == ["running", "running"]
    assert content["job"]["exit_code"] is None
    assert content["summary"]["failed"] == 0
    assert (content["first_failure"], content["diagnosis"]) == (None, [])
    assert "exit code" not in shown(content) and shown(content).count("running") == 2


def test_status_json_says_that_a_job_runs_where_no_scheduler_does(run: Run) -> None:
    run.rank(0)
    write_json(run.path / "status.json", {"state": "RUNNING", "started_s": START, "attempt": 0})
    assert ended(run.report())[0] == "running"


@pytest.mark.parametrize("state", [None, "PENDING"])
def test_without_a_word_on_the_attempt_a_rank_is_lost_not_failed(
    run: Run, state: str | None
) -> None:
    run.rank(0)
    content = run.report(state)
    assert ended(content)[0] == "lost: no end recorded"
    assert not content["ranks"][0]["failed"]


def test_the_end_of_an_attempt_before_says_nothing_of_the_one_that_runs(run: Run) -> None:
    run.status(attempt=0)
    (run.path / "records" / "1").mkdir(parents=True)
    slot = Slot(run.path / "records" / "1" / "n1.rec", "n1", 0, 2)
    slot.process.write({"rank": 0, "pid": 1, "updated_s": START})
    assert ended(run.report("RUNNING"))[0] == "running"


def test_killing_a_whole_rank_of_a_job_names_it(
    home: Any, log: Callable[..., str], wait_until: Callable[..., Any]
) -> None:
    home.job("import os, time\nprint('ready', os.getppid(), flush=True)\ntime.sleep(60)")
    run = home.submit()
    wait_until(lambda: log(run).count("ready") == 2, "two ranks")
    assert ended(home.report(run)) == ["running", "running"]
    time.sleep(1.1)  # a sample
    line = next(line for line in log(run).splitlines() if line.startswith("1: ready"))
    os.kill(int(line.split()[-1]), signal.SIGKILL)
    home.wait_for(run, "FAILED")
    content = home.report(run)
    assert (first(content), ended(content)[1]) == (1, "killed: no end recorded")
    assert "whole rank was killed" in diagnosis(content)[1]


# -- an error, then a signal -----------------------------------------------------------------------


@pytest.mark.parametrize("end", [{"ended": 40, "by": signal.SIGTERM}, {}], ids=["TERM", "KILL"])
def test_out_of_memory_counts_before_the_signal_that_ended_the_teardown(
    run: Run, end: dict[str, Any]
) -> None:
    run.rank(0, 20, error_at=12, error="RuntimeError: connection reset", ended=13, code=1)
    run.rank(1, 40, error_at=10, term=14, **OUT_OF_MEMORY, **end)
    content = run.report("FAILED")
    assert ended(content) == ["exited", "out of memory"]
    assert (first(content), content["first_failure"]["time"]) == (1, START + 10)
    assert diagnosis(content) == (
        "gpu_capacity",
        "rank 1 on n1: OutOfMemoryError: tried 2 GiB",
    )
    state = states.JobState("FAILED", 143)
    assert states.exit_code_of(state, content) == states.EXIT_OUT_OF_MEMORY


def test_an_exception_counts_before_the_signal_that_ended_the_teardown(run: Run) -> None:
    run.rank(0, 20, term=15, ended=15.5, code=1)
    run.rank(1, 40, error_at=10, term=15, ended=40, by=signal.SIGKILL)
    content = run.report("FAILED")
    assert ended(content) == ["exited", "error"]
    assert first(content) == 1
    assert diagnosis(content) == (
        "task_failure",
        "rank 1 on n1 failed: ValueError: bad, then SIGKILL",
    )


def test_out_of_memory_in_a_rank_that_hangs_afterwards_is_exit_6(home: Any) -> None:
    home.job("""\
import atexit, os, time
if os.environ["RANK"] == "1":
    class OutOfMemoryError(RuntimeError): pass
    atexit.register(lambda: (open("raised", "w").close(), time.sleep(60)))
    raise OutOfMemoryError("tried 2 GiB")
while not os.path.exists("raised"):
    time.sleep(0.02)
time.sleep(0.5)
raise RuntimeError("connection reset by peer")
""")
    code, run, done = home.submit_and_wait()
    content = home.report(run)
    assert code == 6, done.err
    assert content["ranks"][1]["signal"] == signal.SIGTERM
    assert (first(content), ended(content)) == (1, ["exited", "out of memory"])


# -- ended from outside ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state, label, said",
    [
        ("CANCELLED", "unknown", "cancelled"),
        ("TIMEOUT", "unknown", "time limit"),
        ("DEADLINE", "unknown", "deadline"),
        ("PREEMPTED", "preempted_requeued", "preempted"),
        ("NODE_FAIL", "node_failure", "a node failed"),
    ],
)
def test_a_job_ended_from_outside_is_no_failure_of_a_rank(
    run: Run, state: str, label: str, said: str
) -> None:
    run.rank(0, ended=11, code=1)  # it handles TERM so
    run.rank(1, 41)  # killed at KillWait
    content = run.report(state)
    assert content["first_failure"] is None
    assert diagnosis(content)[0] == label
    assert said in diagnosis(content)[1] and state in diagnosis(content)[1]


def test_an_error_before_a_job_was_cancelled_is_still_the_failure(run: Run) -> None:
    """The others hang in a collective until somebody looks."""
    run.rank(0, 90, term=90, ended=91, code=1)
    run.rank(1, 90, error_at=10, term=90, ended=91, by=signal.SIGTERM, **OUT_OF_MEMORY)
    content = run.report("CANCELLED")
    assert (first(content), diagnosis(content)[0]) == (1, "gpu_capacity")


def test_an_exception_raised_by_a_handler_of_term_is_not_a_failure(run: Run) -> None:
    run.rank(0, 11, error_at=11.00, term=11.01, ended=12, code=1)
    run.rank(1, 11, error_at=11.05, term=11.01, ended=12, code=1)
    content = run.report("TIMEOUT")
    assert content["first_failure"] is None
    assert "time limit" in diagnosis(content)[1]


def test_errors_of_connections_to_a_failed_node_are_not_the_failure(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks=4)
    for rank in (0, 1):
        run.rank(rank, 30, error_at=25, ended=30, code=1)
    run.rank(2, 20)  # of rank 3 not even a record came through
    content = run.report("NODE_FAIL")
    assert content["first_failure"] is None
    assert diagnosis(content)[0] == "node_failure"


# -- stopped near the limit ------------------------------------------------------------------------


def test_a_stop_before_the_limit_is_a_checkpoint_not_a_success(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        run.rank(rank, term=10, ended=11, code=0)
    assert epilog.main("end", run.path, 85) == 0
    status = read_json(run.path / "status.json") or {}
    assert (status["state"], status["checkpointed"], status["exit_code"]) == ("FAILED", True, 85)
    for content in (read_json(run.path / "report.json") or {}, run.report("FAILED", 85)):
        [only] = content["diagnosis"]
        assert only["label"] == "preempted_requeued"
        assert only["evidence"] == "stopped before the time limit, as asked"
        assert only["advice"] == "resume from the checkpoint"
        assert content["first_failure"] is None


def test_a_rank_that_failed_is_named_whatever_the_exit_code(run: Run) -> None:
    run.rank(0, ended=11, code=85)
    run.status(exit_code=85)
    assert first(run.report("FAILED", 85)) == 0


@pytest.mark.parametrize("code, state", [(0, "COMPLETED"), (1, "FAILED")])
def test_other_ends_are_not_checkpointed(run: Run, code: int, state: str) -> None:
    epilog.main("end", run.path, code)
    status = read_json(run.path / "status.json") or {}
    assert (status["state"], status["checkpointed"]) == (state, False)


def test_the_launcher_and_the_payload_mean_the_same_ends() -> None:
    assert report.EXIT_NEAR_LIMIT == render.EXIT_NEAR_LIMIT
    assert report.FINAL_STATES == states.FINAL_STATES


# -- more records than ranks -----------------------------------------------------------------------


def test_a_second_start_on_another_node_has_the_rows(run: Run) -> None:
    run.rank(0, ended=20, code=3)
    run.rank(1, ended=20, code=3)
    for rank in range(2):
        run.rank(rank, 110, file="n9", started=100, ended=120, code=0)
    content = run.report("COMPLETED", 0)
    assert [(row["rank"], row["exit_code"]) for row in content["ranks"]] == [(0, 0), (1, 0)]
    assert content["summary"]["superseded"] == [
        "n1.rec: rank 0 is taken from n9.rec",
        "n1.rec: rank 1 is taken from n9.rec",
    ]
    assert content["attempts"] == [{"attempt": 0, "ranks": 2}]
    assert "not shown: n1.rec: rank 0 is taken from n9.rec" in shown(content)


def test_a_copied_file_adds_no_rows(run: Run) -> None:
    run.rank(0, ended=20, code=0)
    folder = run.path / "records" / "0"
    (folder / "copy of n1.rec").write_bytes((folder / "n1.rec").read_bytes())
    content = run.report("COMPLETED", 0)
    assert [row["rank"] for row in content["ranks"]] == [0, 1]
    assert content["summary"]["ranks"] == 2
    assert len(content["summary"]["superseded"]) == 1


# -- the epilog where not everything can be written ------------------------------------------------


def end_as_the_script_does(run: Run) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(Path(epilog.__file__)), "end", str(run.path), "1"]
    environ = {**os.environ, "SLURM_JOB_ID": "7"}
    return subprocess.run(words, capture_output=True, text=True, env=environ, check=False)


def test_without_room_for_the_status_the_report_is_written(run: Run) -> None:
    run.rank(0)
    (run.path / "status.json").mkdir()  # cannot be replaced by a file
    done = end_as_the_script_does(run)
    assert done.returncode == 1
    assert "status.json was not written: " in done.stderr
    assert str(run.path / "report.json") in done.stdout
    content = read_json(run.path / "report.json") or {}
    assert (content["job"]["state"], content["job"]["exit_code"]) == ("FAILED", 1)
    assert ended(content)[0] == "killed: no end recorded"


def test_without_room_for_the_report_the_status_is_written(run: Run) -> None:
    (run.path / "report.json").mkdir()
    done = end_as_the_script_does(run)
    assert done.returncode == 1
    assert "report.json was not written: " in done.stderr
    assert done.stdout == ""
    assert (read_json(run.path / "status.json") or {})["state"] == "FAILED"


def test_without_room_for_anything_both_are_named(run: Run) -> None:
    for name in ("status.json", "report.json"):
        (run.path / name).mkdir()
    done = end_as_the_script_does(run)
    assert done.returncode == 1
    assert done.stderr.count("was not written") == 2 and done.stdout == ""


def test_an_error_in_the_report_itself_does_not_take_the_status_along(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "build", lambda *args, **more: {}["summary"])
    assert epilog.main("end", run.path, 0) == 1
    assert (read_json(run.path / "status.json") or {})["state"] == "COMPLETED"
    assert "report.json was not written: KeyError" in capsys.readouterr().err


def test_a_job_in_which_no_rank_started_says_so(home: Any) -> None:
    home.job("print(1)", python="/nowhere/python")
    code, run, done = home.submit_and_wait()
    assert code == 5
    [diagnosis] = home.report(run)["diagnosis"]
    assert diagnosis["label"] == "launch_failure"
    assert "no rank started" in diagnosis["evidence"]
    assert "no /nowhere/python on" in done.err, "the script's own words are shown"


def test_the_traceback_of_the_first_failing_rank_is_shown(home: Any) -> None:
    home.job(
        "import os, time\n"
        "def step():\n"
        "    raise RuntimeError('boom')\n"
        "step() if os.environ['RANK'] == '1' else time.sleep(30)\n"
    )
    code, _, done = home.submit_and_wait()
    assert code == 5
    assert "    RuntimeError: boom" in done.err
    assert "in step" in done.err


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:19348: Connection reset by peer.",
        "DistBackendError: NCCL error: remote process exited or there was a network error",
        "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:4848",
    ],
)
def test_a_rank_that_lost_its_peer_did_not_fail_first(run: Run, error: str) -> None:
    """The peer's end is recorded by the process that waited for it, a moment later."""
    run.rank(0, error_at=10.0, ended=10.4, code=1, error=error)
    run.rank(1, ended=10.1, by=signal.SIGKILL)
    run.status()
    assert first(run.report("FAILED")) == 1


def test_a_lost_connection_alone_is_the_failure(run: Run) -> None:
    run.rank(0, error_at=10.0, ended=10.4, code=1, error="RuntimeError: Connection reset by peer")
    run.rank(1, term=10.5, ended=10.6, by=signal.SIGTERM)
    run.status()
    assert first(run.report("FAILED")) == 0
