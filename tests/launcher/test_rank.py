"""The rank runner as a process of its own, started the way the rendered script does."""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtlaunch.launcher.processes import alive
from mtlaunch.launcher.runner.report import build

SHOW = """\
import json, os, sys
import __main__
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__, "cwd": os.getcwd(),
    "globals": sorted(globals()), "main_is_this": __main__.__dict__ is globals(),
    "package": __package__, "spec": __spec__ and __spec__.name, "loader": type(__loader__).__name__,
}))
"""


def start_and_read_pid(ranks: Any, script: str, **options: Any) -> tuple[Any, int]:
    """A rank whose script prints its pid first, and that pid."""
    process = ranks.start(ranks.prepare(script), **options)
    line = process.stdout.readline()
    assert line.strip().isdigit(), line + process.stderr.read()
    return process, int(line)


# -- how it ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, code",
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit(0)", 0),
        ("import sys; sys.exit()", 0),
        ("import os; os._exit(4)", 4),
        ("raise SystemExit(True)", 1),
        ("exit(6)", 6),
    ],
)
def test_the_exit_code_of_the_script_is_kept_and_recorded(
    ranks: Any, script: str, code: int
) -> None:
    assert ranks.run(script).code == code
    record = ranks.record()
    assert record.exit["exit_code"] == code
    assert record.exit["signal"] is None
    assert record.exit["pid"] == record.process["pid"]


def test_an_exit_with_a_text_prints_it_and_counts_as_1(ranks: Any) -> None:
    done = ranks.run("import sys; sys.exit('no data in /data')")
    assert done.code == 1
    assert "no data in /data" in done.err
    assert "Traceback" not in done.err


def python_says(ranks: Any) -> str:
    """What `python train.py` writes to stderr."""
    words = [sys.executable, "train.py"]
    return subprocess.run(words, cwd=ranks.folder, capture_output=True, text=True).stderr


@pytest.mark.parametrize(
    "script",
    [
        "def f():\n    raise ValueError('bad')\nf()\n",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e\n",
        "x = (1,\n",
        "import sys\nsys.excepthook = lambda *a: print('my hook', a[0], file=sys.stderr)\n1 / 0\n",
    ],
    ids=["raise", "chained", "syntax error", "own hook"],
)
def test_an_exception_is_printed_as_python_prints_it_and_counts_as_1(
    ranks: Any, script: str
) -> None:
    done = ranks.run(script)
    assert done.code == 1
    assert done.err == python_says(ranks)
    assert ranks.record().process["error"]


def test_an_exception_is_in_the_record_with_its_kind(ranks: Any) -> None:
    ranks.run("class OutOfMemoryError(RuntimeError): pass\nraise OutOfMemoryError('tried 2 GiB')")
    process = ranks.record().process
    assert process["error"] == "OutOfMemoryError: tried 2 GiB"
    assert process["oom"] is True
    assert process["started_s"] <= process["error_s"] <= ranks.record().exit["ended_s"]
    assert "train.py" in process["traceback"]


def test_a_script_killed_by_a_signal_is_recorded_and_the_rank_dies_by_it_too(ranks: Any) -> None:
    script = """\
import os, signal
held = bytearray(150 * 2**20)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert ranks.run(script).code == -signal.SIGKILL
    record = ranks.record()
    assert (record.exit["signal"], record.exit["exit_code"]) == (9, None)
    assert 150 * 2**20 < record.exit["host_peak_bytes"] < 400 * 2**20
    assert record.process["phase"] != "ended"


def test_a_crash_of_the_script_ends_the_rank_by_the_same_signal(ranks: Any) -> None:
    assert ranks.run("import os; os.abort()").code == -signal.SIGABRT
    assert ranks.record().exit["signal"] == signal.SIGABRT


def test_killing_the_waiting_parent_takes_the_script_along(
    ranks: Any, wait_until: Callable[..., Any]
) -> None:
    script = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    process, pid = start_and_read_pid(ranks, script)
    assert pid != process.pid
    process.kill()
    wait_until(lambda: not alive(pid, None), "end of the script")


def test_the_time_of_the_first_term_is_recorded_before_the_rank_has_ended(
    ranks: Any, wait_until: Callable[..., Any]
) -> None:
    script = "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    script += "print(os.getpid(), flush=True)\ntime.sleep(60)"
    process, pid = start_and_read_pid(ranks, script)
    asked = time.time()
    os.killpg(process.pid, signal.SIGTERM)
    wait_until(lambda: "term_s" in ranks.record().exit, "the TERM in the record")
    os.killpg(process.pid, signal.SIGTERM)
    os.kill(pid, signal.SIGKILL)
    ranks.finish(process)
    end = ranks.record().exit
    assert asked <= end["term_s"] < asked + 5
    assert (end["signal"], end["pid"]) == (signal.SIGKILL, pid)
    assert end["term_s"] <= end["ended_s"]


def test_threads_and_atexit_functions_of_the_script_run_to_their_end(ranks: Any) -> None:
    script = """\
import atexit, threading, time, pickle
class Thing: pass
atexit.register(lambda: print("atexit", pickle.loads(pickle.dumps(Thing())).__class__.__name__))
def late():
    time.sleep(0.2)
    print("thread", type(pickle.loads(pickle.dumps(Thing()))).__module__)
threading.Thread(target=late).start()
"""
    done = ranks.run(script)
    assert (done.code, done.out.split()) == (0, ["thread", "__main__", "atexit", "Thing"]), done.err


# -- signals ---------------------------------------------------------------------------------------

SAVES = """\
import os, signal, sys, time
def save(number, frame):
    print("saving after", signal.Signals(number).name, flush=True)
    sys.exit(17)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, save)
print(os.getpid(), flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP"])
def test_a_signal_to_every_process_reaches_the_scripts_handler_whose_code_counts(
    ranks: Any, name: str
) -> None:
    process, _ = start_and_read_pid(ranks, SAVES)
    os.killpg(process.pid, signal.Signals[name])
    done = ranks.finish(process)
    assert (done.code, done.out) == (17, f"saving after {name}\n"), done.err


def test_term_ends_a_script_without_a_handler_by_term(ranks: Any) -> None:
    script = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    process, _ = start_and_read_pid(ranks, script)
    os.killpg(process.pid, signal.SIGTERM)
    assert ranks.finish(process).code == -signal.SIGTERM
    assert ranks.record().exit["signal"] == signal.SIGTERM


# -- the environment -------------------------------------------------------------------------------

NEVER = "print('the script ran')"


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"MY_FLAG": "2"}, "MY_FLAG should be '1' and is '2'"),
        ({"MY_FLAG": None}, "MY_FLAG should be '1' and is not set"),
        ({"NCCL_CTA_POLICY": "1"}, "NCCL_CTA_POLICY should be unset and is '1'"),
        ({"MY_FLAG": "y" * 50_000}, "MY_FLAG should be '1' and is 'yyy"),
    ],
    ids=["changed", "missing", "not unset", "changed to something long"],
)
def test_an_environment_that_did_not_arrive_stops_the_rank_before_the_script(
    ranks: Any, changes: dict[str, str | None], said: str
) -> None:
    run = ranks.prepare(NEVER, env={"MY_FLAG": "1"})
    done = ranks.finish(ranks.start(run, ranks.environment(**changes)))
    assert (done.code, done.out) == (78, "")
    assert said in done.err
    assert len(done.err) < 2000
    process = ranks.record().process
    assert said in process["error"]
    assert process["phase"] == "refused"
    assert ranks.record().exit["exit_code"] == 78


def test_a_secret_that_is_missing_stops_the_rank_and_no_value_is_ever_written(ranks: Any) -> None:
    run = ranks.prepare("import os; print(len(os.environ['HF_TOKEN']))", secrets=["HF_TOKEN"])
    done = ranks.finish(ranks.start(run, ranks.environment(HF_TOKEN=None)))
    assert done.code == 78
    assert "HF_TOKEN (a secret of the job file) is not set" in done.err
    secret = "hf_" + "s3cr3t" * 3
    done = ranks.finish(ranks.start(run, ranks.environment(HF_TOKEN=secret)))
    assert (done.code, done.out) == (0, "21\n"), done.err
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert not [path for path in files if secret.encode() in path.read_bytes()]


RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
SHOW_RANK = f"""\
import json, os
print(json.dumps([os.environ.get(name) for name in {RANK_VARIABLES}]))
"""


def shown_ranks(ranks: Any, **changes: str | None) -> list[str | None]:
    run = ranks.prepare(SHOW_RANK)
    done = ranks.finish(ranks.start(run, ranks.environment(**changes)))
    shown: list[str | None] = json.loads(done.out)
    return shown


def test_the_variables_of_torch_distributed_come_from_slurm(ranks: Any) -> None:
    found = shown_ranks(
        ranks,
        SLURM_PROCID="13",
        SLURM_NTASKS="16",
        SLURM_LOCALID="5",
        SLURM_NODEID="1",
        SLURM_NTASKS_PER_NODE="8",
        RANK="99",
        WORLD_SIZE="99",
    )
    assert found == ["13", "16", "5", "8", "1"]


def test_without_ntasks_per_node_slurms_compressed_count_is_read(ranks: Any) -> None:
    changes = {"SLURM_NTASKS_PER_NODE": None, "SLURM_TASKS_PER_NODE": "8(x2)"}
    assert shown_ranks(ranks, **changes)[3] == "8"


def test_under_torchrun_its_own_variables_are_kept(ranks: Any) -> None:
    own = dict(zip(RANK_VARIABLES, ("3", "4", "1", "2", "1"), strict=True))
    found = shown_ranks(ranks, TORCHELASTIC_RUN_ID="7", **own)
    assert found == ["3", "4", "1", "2", "1"]
    assert (ranks.record().rank, ranks.record().local_rank) == (3, 1)


# -- the script sees what `python script.py` gives it ----------------------------------------------


def python_shows(ranks: Any, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *words], cwd=ranks.folder, capture_output=True, text=True, check=True
    )
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


def differences(ranks: Any, shown: dict[str, Any], python: dict[str, Any]) -> dict[str, Any]:
    """What differs, once the payload behind the script's folder is taken out of sys.path."""
    assert shown["path"].pop(1) == str(ranks.folder / "run" / "payload")
    return {key: (value, python[key]) for key, value in shown.items() if value != python[key]}


@pytest.mark.parametrize(
    "entrypoint", ["train.py", "./train.py", "sub/../train.py", "sub/train.py"]
)
def test_a_script_sees_what_python_shows_it(ranks: Any, entrypoint: str) -> None:
    (ranks.folder / "sub").mkdir()
    (ranks.folder / "sub" / "train.py").write_text(SHOW)
    args = {"lr": 0.1, "name": "a b", "list": ["x", "y"]}
    done = ranks.run(SHOW, entrypoint=entrypoint, args=args, extra_args=["--", "-x"])
    words = ["--lr", "0.1", "--name", "a b", "--list", "x", "y", "--", "-x"]
    python = python_shows(ranks, entrypoint, *words)
    assert differences(ranks, json.loads(done.out), python) == {}


def test_a_module_runs_as_python_m_runs_it(ranks: Any) -> None:
    package = ranks.folder / "trainer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "main.py").write_text(SHOW)
    done = ranks.run("", entrypoint={"module": "trainer.main"}, args={"lr": 0.1})
    python = python_shows(ranks, "-m", "trainer.main", "--lr", "0.1")
    found = differences(ranks, json.loads(done.out), python)
    found.pop("globals", None)  # runpy leaves __annotations__ out
    assert found == {}


def test_a_module_that_does_not_exist_is_a_plain_error(ranks: Any) -> None:
    done = ranks.run("", entrypoint={"module": "no_such_module"})
    assert done.code == 1
    assert "No module named" in done.err
    assert "runner" not in done.err


def test_the_scripts_folder_comes_before_everything_and_modules_of_the_runner_do_not_shadow(
    ranks: Any,
) -> None:
    (ranks.folder / "record.py").write_text("whose = 'mine'")
    (ranks.folder / "report.py").write_text("whose = 'mine'")
    done = ranks.run("import record, report; print(record.whose, report.whose)")
    assert done.out == "mine mine\n", done.err


def test_the_mtlaunch_of_the_payload_is_used_not_an_installed_one(ranks: Any) -> None:
    script = "import mtlaunch.launcher.runner.rank as r, mtlaunch.kernels as k\n"
    done = ranks.run(script + "print(r.__file__); print(k.__file__)")
    payload = str(ranks.folder / "run" / "payload")
    assert [line.startswith(payload) for line in done.out.split()] == [True, True], done.err


def test_workers_that_the_script_spawns_find_its_classes(ranks: Any) -> None:
    script = """\
import multiprocessing
class Batch:
    def __init__(self, n): self.n = n
def double(batch): return Batch(2 * batch.n)
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [Batch(21)])[0].n)
"""
    done = ranks.run(script)
    assert (done.code, done.out) == (0, "42\n"), done.err


def test_a_process_that_the_script_forks_does_not_write_the_ranks_record(ranks: Any) -> None:
    script = """\
import os, sys
pid = os.fork()
if pid == 0:
    sys.exit(0)
os.waitpid(pid, 0)
os._exit(0)
"""
    assert ranks.run(script).code == 0
    assert ranks.record().process["phase"] != "ended"


# -- the recorder ----------------------------------------------------------------------------------


def test_host_memory_is_recorded_while_the_script_runs_and_at_its_end(
    ranks: Any, wait_until: Callable[..., Any]
) -> None:
    script = """\
import os, sys
held = bytearray(150 * 2**20)
print(os.getpid(), flush=True)
sys.stdin.readline()
"""
    process, _ = start_and_read_pid(ranks, script, stdin=subprocess.PIPE)
    peak = 150 * 2**20
    wait_until(lambda: ranks.record().process.get("host_peak_bytes", 0) > peak, "a sample", 5)
    assert ranks.record().process["phase"] == "running"
    assert ranks.record().exit == {}
    process.communicate("\n", timeout=20)
    record = ranks.record()
    assert record.process["phase"] == "ended"
    assert record.process["host_peak_bytes"] > peak
    assert record.process["versions"]["python"] == sys.version.split()[0]
    assert record.process["job_id"] == "7"
    assert time.time() - record.exit["ended_s"] < 20


def test_allocator_peaks_are_those_of_the_device_that_the_rank_uses(ranks: Any) -> None:
    """A stand-in for torch: the current device of the recorder's thread is 0, the rank's is 1."""
    (ranks.folder / "torch.py").write_text("""\
import types
__version__ = "2.99"
stats = {0: {"reserved_bytes.all.peak": 0, "allocated_bytes.all.peak": 0},
         1: {"reserved_bytes.all.peak": 9 * 2**30, "allocated_bytes.all.peak": 7 * 2**30}}
def info(device=0):
    assert device == 1, "a context on a device that the rank does not use"
    return 60 * 2**30, 80 * 2**30
cuda = types.SimpleNamespace(
    is_initialized=lambda: True, device_count=lambda: 2, current_device=lambda: 0,
    memory_stats=lambda device=0: stats[device], mem_get_info=info,
    get_device_name=lambda device=0: f"card {device}")
""")
    assert ranks.run("import torch").code == 0
    process = ranks.record().process
    assert process.get("recorder_error") is None
    assert process["peak_allocated_bytes"] == 7 * 2**30
    assert process["peak_reserved_bytes"] == 9 * 2**30
    assert process["peak_device_bytes"] == 20 * 2**30
    assert process["gpu"] == {"name": "card 1", "capacity_bytes": 80 * 2**30, "index": 1}
    assert process["versions"]["torch"] == "2.99"


def test_an_error_of_the_recorder_never_reaches_the_script(ranks: Any) -> None:
    (ranks.folder / "torch.py").write_text("""\
import types
def broken(*args): raise RuntimeError("CUDA error")
cuda = types.SimpleNamespace(is_initialized=broken)
""")
    done = ranks.run("import torch, time; time.sleep(1.2); print('trained')")
    assert (done.code, done.out, done.err) == (0, "trained\n", "")


@pytest.mark.parametrize(
    "answer", ["raise RuntimeError('CUDA error')", "time.sleep(60)"], ids=["error", "hang"]
)
def test_an_error_is_recorded_where_the_device_answers_no_more(
    ranks: Any, wait_until: Callable[..., Any], answer: str
) -> None:
    (ranks.folder / "torch.py").write_text(f"""\
import time, types
def asked(*args): {answer}
cuda = types.SimpleNamespace(is_initialized=asked)
""")
    process = ranks.start(
        ranks.prepare(
            "import os, torch, time\nprint(os.getpid(), flush=True)\n"
            "time.sleep(1.2)\nraise ValueError('bad')"
        )
    )
    process.stdout.readline()
    wait_until(lambda: ranks.record().process.get("error"), "the error", 5)
    assert ranks.record().process["error"] == "ValueError: bad"
    assert select.select([process.stderr], [], [], 5)[0], "no traceback"
    assert process.stderr.readline().startswith("Traceback")


def test_training_runs_where_no_record_can_be_made(ranks: Any) -> None:
    run = ranks.prepare("print('trained')")
    (run.path / "records").rmdir()
    (run.path / "records").write_text("a file where the folder should be")
    done = ranks.finish(ranks.start(run))
    assert (done.code, done.out) == (0, "trained\n")
    assert "no record for local rank 1 on n1" in done.err


def test_training_runs_where_the_disk_is_full(ranks: Any) -> None:
    def no_space() -> None:  # as near to a full disk as a process can bring itself
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = ranks.finish(ranks.start(ranks.prepare("print('trained')"), preexec_fn=no_space))
    assert (done.code, done.out) == (0, "trained\n")
    assert "no record" in done.err


def test_a_second_start_of_the_same_script_does_not_show_the_first_ones_end(
    ranks: Any, wait_until: Callable[..., Any]
) -> None:
    run = ranks.prepare("import sys; print(1, flush=True); sys.stdin.readline(); sys.exit(3)")
    first = ranks.start(run, stdin=subprocess.PIPE)
    first.communicate("\n", timeout=20)
    assert build(run.path)["ranks"][1]["exit_code"] == 3
    second = ranks.start(run, stdin=subprocess.PIPE)
    second.stdout.readline()
    row = build(run.path)["ranks"][1]
    assert (row["exit_code"], row["ended"]) == (None, "lost: no end recorded")
    second.communicate("\n", timeout=20)
    assert build(run.path)["ranks"][1]["exit_code"] == 3


def test_the_runner_needs_nothing_but_its_payload(tmp_path: Path, ranks: Any) -> None:
    """A bare interpreter without site-packages: what a container has."""
    run = ranks.prepare("import sys; print([n for n in sys.modules if n.startswith('mtlaunch')])")
    main = run.path / "payload" / "mtlaunch" / "launcher" / "runner" / "__main__.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(main), str(run.path)],
        env=ranks.environment(),
        cwd=ranks.folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    modules = re.findall(r"'([\w.]+)'", done.stdout)
    assert modules
    assert all(
        name == "mtlaunch"
        or name in ("mtlaunch.launcher", "mtlaunch.launcher.runner")
        or name.startswith("mtlaunch.launcher.runner.")
        for name in modules
    )
