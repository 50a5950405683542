"""The fixture itself: a real Slurm that comes up, runs jobs and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import slurm_cluster
from slurm_cluster import SlurmCluster, SlurmClusterError, processes_with, why_unavailable

# `slurm` goes first: it is what skips, or fails, when there is no Slurm.
pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]


def test_two_node_job_completes(slurm: SlurmCluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = "#!/bin/bash\nsrun bash -c 'echo $SLURMD_NODENAME $SLURM_PROCID of $SLURM_NTASKS'\n"
    job = slurm.sbatch(script, "--nodes=2", "--ntasks-per-node=2", f"--output={log}")
    assert slurm.wait_job(job) == "COMPLETED"
    assert sorted(log.read_text().splitlines()) == [
        "n1 0 of 4",
        "n1 1 of 4",
        "n2 2 of 4",
        "n2 3 of 4",
    ]
    assert slurm.sacct(job) == [
        {"JobID": job, "State": "COMPLETED", "ExitCode": "0:0"},
        {"JobID": f"{job}.batch", "State": "COMPLETED", "ExitCode": "0:0"},
        {"JobID": f"{job}.0", "State": "COMPLETED", "ExitCode": "0:0"},
    ]
    assert slurm.squeue() == []
    assert slurm.nodes_idle()


def test_failing_job_keeps_its_exit_code(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = slurm.sbatch("#!/bin/bash\nsrun bash -c 'exit 3'\n", f"--output={tmp_path}/log")
    assert slurm.wait_job(job) == "FAILED"
    rows = slurm.sacct(job, ["JobID", "State", "ExitCode", "DerivedExitCode"])
    assert [(row["State"], row["ExitCode"]) for row in rows] == [("FAILED", "3:0")] * 3
    assert rows[0]["DerivedExitCode"] == "3:0"
    assert slurm.squeue() == []


def test_gpus_are_gres(slurm: SlurmCluster, tmp_path: Path) -> None:
    out = slurm.run("sinfo", "--noheader", "--Node", "--format=%N %G").stdout
    assert out.split() == ["n1", "gpu:h100:8", "n2", "gpu:h100:8"]
    log = tmp_path / "log"
    script = "#!/bin/bash\nscontrol --oneliner show job $SLURM_JOB_ID\n"
    job = slurm.sbatch(script, "--nodes=2", "--gpus-per-node=h100:8", f"--output={log}")
    assert slurm.wait_job(job) == "COMPLETED"
    assert "gres/gpu=16" in log.read_text()
    with pytest.raises(SlurmClusterError, match="Requested node configuration is not available"):
        slurm.sbatch(script, "--gpus-per-node=h100:9")


def test_the_account_exists(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = slurm.sbatch("#!/bin/bash\n", "--account=research", f"--output={tmp_path}/log")
    assert slurm.wait_job(job) == "COMPLETED"
    assert slurm.sacct(job, ["Account", "Partition"])[0] == {
        "Account": "research",
        "Partition": "gpu",
    }


def test_a_running_job_times_out_the_wait_and_is_cleared(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    # The orphans: Slurm itself loses them (linuxproc), `clear` must not.
    script = (
        "#!/bin/bash\ntrap '' TERM\n"
        f"(setsid sleep 300 &)\necho up > {tmp_path}/up\nwhile :; do sleep 300; done\n"
    )
    job = slurm.sbatch(script, f"--output={tmp_path}/log")
    _until((tmp_path / "up").exists)
    with pytest.raises(SlurmClusterError, match="RUNNING"):
        slurm.wait_job(job, timeout_s=0.5)
    assert slurm.squeue() == [job]
    assert not slurm.nodes_idle()
    assert slurm.sacct(job, ["State"], settle_s=0)
    assert any("sleep" in command for command in slurm.job_processes(job).values())
    begin = time.monotonic()
    slurm.clear()
    assert time.monotonic() - begin < 10  # far below KillWait
    assert slurm.job(job)[0]["JobState"] in slurm_cluster.FINAL_STATES
    _until(lambda: not slurm.job_processes(job))
    assert slurm.nodes_idle()


def test_clear_resumes_a_drained_node(slurm: SlurmCluster) -> None:
    slurm.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    assert not slurm.nodes_idle()
    slurm.clear()
    assert slurm.nodes_idle()


def test_env_is_clean_of_another_slurm(
    slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURMD_NODENAME", "SBATCH_TIMELIMIT", "SRUN_CPUS_PER_TASK"):
        monkeypatch.setenv(name, "7")
    ours = {key: value for key, value in slurm.env.items() if key.startswith(("SLURM", "S"))}
    assert {k: v for k, v in ours.items() if v == "7"} == {}
    assert slurm.env["SLURM_CONF"] == str(slurm.conf)


def test_unknown_job(slurm: SlurmCluster) -> None:
    with pytest.raises(SlurmClusterError, match="does not know job 9999"):
        slurm.wait_job("9999")


def test_second_cluster_without_accounting(slurm: SlurmCluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with SlurmCluster(
        nodes=1, gpus_per_node=0, accounting=False, kill_wait_s=5, slurm_conf={"MaxArraySize": "9"}
    ) as second:
        assert second.directory != slurm.directory
        config = second.run("scontrol", "show", "config").stdout
        assert "KillWait                = 5 sec" in config
        assert "MaxArraySize            = 9" in config
        assert second.run("sinfo", "--noheader", "--Node", "--format=%N %G").stdout.split() == [
            "n1",
            "(null)",
        ]
        job = second.sbatch("#!/bin/bash\nsrun hostname\n", f"--output={log}")
        assert second.wait_job(job) == "COMPLETED"
        # A job that is still alive when the cluster goes, with a child that hides.
        stuck = (
            "#!/bin/bash\ntrap '' TERM\nsetsid env -i sleep 300 &\n"
            f"echo up > {tmp_path}/up\nwhile :; do sleep 300; done\n"
        )
        second.sbatch(stuck, f"--output={log}")
        _until((tmp_path / "up").exists)
        directory = second.directory
        before = second.processes()
        assert sum("sleep 300" in command for command in before.values()) == 2
    assert not directory.exists()
    assert not [pid for pid in before if _alive(pid)]
    assert processes_with(f"SLURM_CONF={directory}/slurm.conf") == {}
    second.stop()  # again: nothing to do
    with pytest.raises(SlurmClusterError, match="not started"):
        _ = second.env
    assert slurm.nodes_idle()  # the first one did not notice


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        ({"SelectType": "select/nonsense"}, "slurmctld: ended with exit status 1"),
        ({"SlurmdSpoolDir": "/proc/no"}, "slurmd.n1: ended with exit status 1"),
    ],
)
def test_a_failed_start_tells_why_and_leaves_nothing(
    broken: dict[str, str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[str] = []
    real = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **kw: seen.append(real(**kw)) or seen[-1])
    cluster = SlurmCluster(nodes=1, accounting=False, slurm_conf=broken)
    with pytest.raises(SlurmClusterError) as error:
        cluster.start()
    assert str(error.value).startswith(text)
    assert len(str(error.value).splitlines()) > 1  # the tail of its log
    assert list(tmp_path.iterdir()) == []
    assert processes_with(f"SLURM_CONF={seen[0]}/slurm.conf") == {}


def test_daemons_die_with_a_killed_test_process(tmp_path: Path) -> None:
    here = str(Path(slurm_cluster.__file__).parent)
    code = (
        "import sys, os, signal\n"
        f"sys.path.insert(0, {here!r})\n"
        "from slurm_cluster import SlurmCluster\n"
        "c = SlurmCluster(nodes=1, accounting=False)\n"
        "c.start()\n"
        "print(c.conf, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    conf = done.stdout.strip()
    assert conf.startswith(str(tmp_path)), done.stderr
    _until(lambda: not processes_with(f"SLURM_CONF={conf}"))
    shutil.rmtree(Path(conf).parent)


def test_reason_names_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_unavailable() is None
    real = shutil.which
    gone = {"slurmdbd", "munged"}
    monkeypatch.setattr(
        shutil, "which", lambda name, **kw: None if name in gone else real(name, **kw)
    )
    reason = why_unavailable()
    assert reason is not None
    assert "munged, slurmdbd" in reason
    assert "munge slurmdbd" in reason
    assert "apt-get install slurm-wlm slurmdbd munge mariadb-server" in reason
    without = why_unavailable(accounting=False)
    assert without is not None and "slurmdbd (" not in without
    with pytest.raises(SlurmClusterError, match="not installed"):
        SlurmCluster().start()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in (why_unavailable() or "")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # a zombie has none
    except OSError:
        return False


def _until(true: object, timeout_s: float = 15.0) -> None:
    assert callable(true)
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)
