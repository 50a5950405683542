"""A real Slurm on this machine, for tests.

`SlurmCluster` starts munge, MariaDB, slurmdbd, slurmctld and a few slurmd, all of them on
loopback, on free ports and below one temporary directory, and takes them down again.  It neither
needs nor touches a Slurm, munge or MariaDB of the system, and several clusters can run at once::

    with SlurmCluster(nodes=2) as slurm:
        job = slurm.sbatch("#!/bin/bash\\nsrun hostname\\n", "--nodes=2", "--output=/tmp/log")
        assert slurm.wait_job(job) == "COMPLETED"

What this cluster is not: it has no cgroups, so nothing binds CPUs or GPUs and nobody is killed for
memory; the GPUs are empty files; all nodes share this host.  `proctrack/linuxproc` finds the
processes of a job by their parent, so a process that lost its parent survives its job.  That is
why `job_processes` and `processes` look for them by their environment instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

PACKAGES = "slurm-wlm slurmdbd munge mariadb-server"

FINAL_STATES = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"]
    + ["NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"]
)

# What sacct knows at the end of a job even if slurmdbd has no record of its start yet.
_END_FIELDS = frozenset(["jobid", "state", "exitcode", "derivedexitcode", "nodelist", "elapsed"])

_BINARIES = {
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "scontrol": "slurm-wlm",
}
_ACCOUNTING_BINARIES = {
    "slurmdbd": "slurmdbd",
    "sacctmgr": "slurm-wlm",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
}
# Daemons live in sbin, which is not always on the PATH of a shell.
_SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")
_CLIENT_PREFIXES = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SACCT_", "PMI")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class SlurmClusterError(RuntimeError):
    """The cluster could not be started, stopped or asked; the text has the tail of the log."""


def _search_path() -> str:
    parts = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join([*parts, *(p for p in _SBIN if p not in parts)])


def why_unavailable(accounting: bool = True) -> str | None:
    """The reason why no cluster can be started here, or None when one can."""
    if not sys.platform.startswith("linux"):
        return f"a real Slurm needs Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "a real Slurm needs root: slurmd starts jobs as their user"
    wanted = {**_BINARIES, **(_ACCOUNTING_BINARIES if accounting else {})}
    missing = [name for name in wanted if shutil.which(name, path=_search_path()) is None]
    if missing:
        packages = " ".join(sorted({wanted[name] for name in missing}))
        return (
            f"not installed: {', '.join(missing)} (Debian packages: {packages}; "
            f"all that a cluster needs: apt-get install {PACKAGES})"
        )
    return None


class SlurmCluster:
    """One Slurm cluster; a context manager.

    Args:
        nodes: number of slurmd, named n1, n2, ...
        gpus_per_node: fake H100s of each node (`gpu:h100:N`); 0 for none.
        accounting: with slurmdbd and MariaDB.  Without, `sacct` has nothing to say.
        cpus_per_node: CPUs that a node claims to have.
        real_memory_mb: memory that a node claims to have.
        kill_wait_s: KillWait, the seconds between SIGTERM and SIGKILL.
        slurm_conf: more slurm.conf settings; they replace the ones written here.
        start_timeout_s: the longest that one daemon may take to answer.
        name: ClusterName.

    With accounting there is an account `research` whose only user is root.  The only partition is
    `gpu`.  Jobs that the cluster runs see the environment of `env`.
    """

    def __init__(
        self,
        *,
        nodes: int = 2,
        gpus_per_node: int = 8,
        accounting: bool = True,
        cpus_per_node: int = 16,
        real_memory_mb: int = 16000,
        kill_wait_s: int = 30,
        slurm_conf: Mapping[str, str] | None = None,
        start_timeout_s: float = 60.0,
        name: str = "testbed",
    ) -> None:
        if nodes < 1:
            raise ValueError("a cluster needs at least one node")
        self.node_names = [f"n{i}" for i in range(1, nodes + 1)]
        self.gpus_per_node = gpus_per_node
        self.accounting = accounting
        self.name = name
        self._cpus = cpus_per_node
        self._memory = real_memory_mb
        self._kill_wait = kill_wait_s
        self._extra_conf = dict(slurm_conf or {})
        self._start_timeout = start_timeout_s
        self._daemons: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._dir: Path | None = None
        self._path = _search_path()

    # -- life cycle ------------------------------------------------------------------------------

    @property
    def directory(self) -> Path:
        """The directory with everything of this cluster; gone after `stop`."""
        if self._dir is None:
            raise SlurmClusterError("the cluster is not started")
        return self._dir

    @property
    def conf(self) -> Path:
        """slurm.conf, the value of SLURM_CONF."""
        return self.directory / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """The environment for Slurm's clients: this process's, cleaned of another Slurm's."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(_CLIENT_PREFIXES)}
        env["PATH"] = self._path
        env["SLURM_CONF"] = str(self.conf)
        return env

    def __enter__(self) -> SlurmCluster:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start all daemons and wait until every node is idle.

        The daemons are killed when the thread that called this ends, so call it from the main one.
        """
        reason = why_unavailable(self.accounting)
        if reason is not None:
            raise SlurmClusterError(reason)
        if self._dir is not None:
            raise SlurmClusterError("the cluster is started already")
        # Not below pytest's tmp_path: the path of a socket may have 107 characters only.
        self._dir = Path(tempfile.mkdtemp(prefix="slurm-"))
        try:
            self._start()
        except BaseException:
            with contextlib.suppress(SlurmClusterError):
                self.stop()
            raise

    def stop(self) -> None:
        """Kill everything of this cluster, jobs included, and remove its directory.

        Nothing here is worth a clean shutdown, so all get SIGKILL.  Safe to call twice.
        """
        if self._dir is None:
            return
        left = self.processes()
        # The last started ones first: without slurmd there is no new job step.
        for _, process in reversed(self._daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 15
        while True:
            _kill(left)
            left = self.processes()
            if not left or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        for _, process in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
        self._daemons.clear()
        directory, self._dir = self._dir, None
        shutil.rmtree(directory, ignore_errors=True)
        if left:
            raise SlurmClusterError(f"these processes of the cluster would not die: {left}")

    def _start(self) -> None:
        directory = self.directory
        directory.chmod(0o755)  # munge's clients need to get to its socket
        socket_path = directory / "munge" / "socket"
        if len(os.fsencode(socket_path)) > 100:
            raise SlurmClusterError(f"the temporary directory's name is too long: {directory}")
        for name in ("munge", "state", "db", "tmp", *(f"spool.{n}" for n in self.node_names)):
            (directory / name).mkdir()
        ports = _free_ports(3 + len(self.node_names))
        ctld_port, dbd_port, db_port, *node_ports = ports
        password = secrets.token_hex(16)
        self._write_config(socket_path, ctld_port, dbd_port, db_port, node_ports, password)

        install: subprocess.Popen[bytes] | None = None
        if self.accounting:
            install = self._spawn("mariadb-install-db", *self._mariadb_options("install"))
        key = directory / "munge" / "key"
        _write_private(key, secrets.token_bytes(128))
        self._spawn(
            "munged",
            "--foreground",
            "--force",  # a directory above us may be writable for a group
            f"--socket={socket_path}",
            f"--key-file={key}",
            f"--pid-file={directory}/munge/pid",
            f"--log-file={directory}/munge/munged.log",
            f"--seed-file={directory}/munge/seed",
        )
        self._until("munged", socket_path.exists)

        if install is not None:
            self._until("mariadb-install-db", lambda: install.poll() is not None, may_end=True)
            if install.returncode != 0:
                raise self._failure("mariadb-install-db", f"exit status {install.returncode}")
            self._spawn(
                "mariadbd", *self._mariadb_options("serve"), f"--init-file={directory}/init.sql",
                "--bind-address=127.0.0.1", f"--port={db_port}",
                f"--socket={directory}/db.sock", f"--pid-file={directory}/db.pid",
                "--skip-name-resolve",
            )  # fmt: skip
            # The server runs the init file before it listens.
            self._until("mariadbd", lambda: _listens(db_port))
            self._spawn("slurmdbd", "-D")
            self._until("slurmdbd", lambda: _listens(dbd_port))
            account = ("add", "account", "research", f"cluster={self.name}", "parent=root")
            user = ("add", "user", "root", f"cluster={self.name}", "account=research")
            for command in (("add", "cluster", self.name), account, user):
                done = self.run("sacctmgr", "-i", *command, check=False)
                if done.returncode != 0:
                    text = f"sacctmgr {' '.join(command)}: {done.stdout}{done.stderr}"
                    raise self._failure("slurmdbd", text)

        self._spawn("slurmctld", "-D", "-c", "-f", str(self.conf))
        self._until("slurmctld", lambda: _listens(ctld_port))
        self._until("slurmctld", lambda: self.run("scontrol", "ping", check=False).returncode == 0)
        for node in self.node_names:
            self._spawn("slurmd", "-D", "-N", node, "-f", str(self.conf), log=f"slurmd.{node}")
        self._until(f"slurmd.{self.node_names[0]}", self.nodes_idle)

    def _mariadb_options(self, purpose: str) -> list[str]:
        options = [
            "--no-defaults",
            "--user=root",
            f"--datadir={self.directory}/db",
            f"--tmpdir={self.directory}/tmp",
            "--innodb-buffer-pool-size=32M",
            "--innodb-log-file-size=16M",
            "--innodb-lock-wait-timeout=900",  # slurmdbd asks for it
            "--innodb-flush-log-at-trx-commit=0",
            "--skip-innodb-use-native-aio",
        ]
        if purpose == "install":
            options += [
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
                "--skip-name-resolve",
            ]
        return options

    def _write_config(
        self,
        socket_path: Path,
        ctld_port: int,
        dbd_port: int,
        db_port: int,
        node_ports: Sequence[int],
        password: str,
    ) -> None:
        d = self.directory
        names = ",".join(self.node_names)
        gres = f" Gres=gpu:h100:{self.gpus_per_node}" if self.gpus_per_node else ""
        settings = {
            "ClusterName": self.name,
            "SlurmctldHost": f"{socket.gethostname().split('.')[0]}(127.0.0.1)",
            "SlurmctldPort": str(ctld_port),
            "SlurmUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={socket_path}",
            "StateSaveLocation": f"{d}/state",
            "SlurmctldPidFile": f"{d}/slurmctld.pid",
            "SlurmctldLogFile": f"{d}/slurmctld.log",
            "SlurmdPidFile": f"{d}/slurmd.%n.pid",
            "SlurmdLogFile": f"{d}/slurmd.%n.log",
            "SlurmdSpoolDir": f"{d}/spool.%n",
            "SlurmdParameters": "config_overrides",
            "MailProg": shutil.which("true") or "/bin/true",
            "MpiDefault": "none",
            "TaskPlugin": "task/none",
            "ProctrackType": "proctrack/linuxproc",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core_Memory",
            "DefMemPerCPU": "100",
            "ReturnToService": "2",
            # Look at the queue at once, not every 3 s.
            "SchedulerParameters": "batch_sched_delay=0,sched_min_interval=0,bf_interval=1",
            "KillWait": str(self._kill_wait),
            "KillOnBadExit": "0",
            "JobRequeue": "1",
            "JobAcctGatherType": "jobacct_gather/linux",
            "AccountingStorageType": "accounting_storage/none",
        }
        if self.gpus_per_node:
            settings["GresTypes"] = "gpu"
        if self.accounting:
            settings |= {
                "AccountingStorageType": "accounting_storage/slurmdbd",
                "AccountingStorageHost": "127.0.0.1",
                "AccountingStoragePort": str(dbd_port),
                "AccountingStoragePass": str(socket_path),  # for munge: the socket
            }
            if self.gpus_per_node:
                settings["AccountingStorageTRES"] = "gres/gpu"
        settings |= self._extra_conf
        lines = [f"{key}={value}" for key, value in settings.items()]
        lines += [
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={self._cpus} SocketsPerBoard=1 CoresPerSocket={self._cpus} ThreadsPerCore=1 "
            f"RealMemory={self._memory}{gres} State=UNKNOWN"
            for node, port in zip(self.node_names, node_ports, strict=True)
        ]
        lines.append(f"PartitionName=gpu Nodes={names} Default=YES MaxTime=UNLIMITED State=UP")
        self.conf.write_text("\n".join(lines) + "\n")
        if self.gpus_per_node:
            # Without files the node registers no GPU and is drained.
            (d / "dev").mkdir()
            for gpu in range(self.gpus_per_node):
                (d / "dev" / f"nvidia{gpu}").touch()
            gpus = f"[0-{self.gpus_per_node - 1}]" if self.gpus_per_node > 1 else "0"
            (d / "gres.conf").write_text(
                f"NodeName={names} Name=gpu Type=h100 File={d}/dev/nvidia{gpus}\n"
            )
        if self.accounting:
            dbd = {
                "AuthType": "auth/munge",
                "AuthInfo": f"socket={socket_path}",
                "DbdHost": "localhost",
                "DbdPort": str(dbd_port),
                "SlurmUser": "root",
                "LogFile": f"{d}/slurmdbd.log",
                "PidFile": f"{d}/slurmdbd.pid",
                "StorageType": "accounting_storage/mysql",
                "StorageHost": "127.0.0.1",
                "StoragePort": str(db_port),
                "StorageUser": "slurm",
                "StoragePass": password,
                "StorageLoc": "slurm_acct_db",
            }
            text = "".join(f"{key}={value}\n" for key, value in dbd.items())
            _write_private(d / "slurmdbd.conf", text.encode())
            sql = (
                "CREATE DATABASE slurm_acct_db;\n"
                f"CREATE USER 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';\n"
                "GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';\n"
            )
            _write_private(d / "init.sql", sql.encode())

    def _spawn(self, program: str, *args: str, log: str | None = None) -> subprocess.Popen[bytes]:
        binary = shutil.which(program, path=self._path)
        if binary is None:
            raise SlurmClusterError(f"not installed: {program}")
        name = log or program
        with open(self.directory / f"{name}.out", "ab") as out:
            process = subprocess.Popen(
                [binary, *args],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env=self.env,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._daemons.append((name, process))
        return process

    def _until(self, name: str, ready: Callable[[], bool], may_end: bool = False) -> None:
        """Wait for a daemon to be ready; raise as soon as any of them is gone."""
        deadline = time.monotonic() + self._start_timeout
        while not ready():
            for other, process in self._daemons:
                if other == "mariadb-install-db" or (may_end and other == name):
                    continue
                if process.poll() is not None:
                    raise self._failure(other, f"ended with exit status {process.returncode}")
            if time.monotonic() > deadline:
                raise self._failure(name, f"not ready after {self._start_timeout:g} s")
            time.sleep(0.05)

    def _failure(self, name: str, what: str) -> SlurmClusterError:
        tails = []
        for path in (self.directory / f"{name}.log", self.directory / f"{name}.out"):
            with contextlib.suppress(OSError):
                lines = path.read_text(errors="replace").splitlines()[-25:]
                if lines:
                    tails.append("\n".join(lines))
                    break
        return SlurmClusterError("\n".join([f"{name}: {what}", *tails]))

    # -- processes -------------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """All living processes of this cluster: daemons, job steps, jobs, clients started by `run`.

        Pid and command line; see `processes_with` for how they are found.
        """
        return processes_with(f"SLURM_CONF={self.conf}")

    def job_processes(self, job_id: str | None = None) -> dict[int, str]:
        """Living processes that a job, or any job, started; orphans too, slurmstepd not."""
        job = "SLURM_JOB_ID" if job_id is None else f"SLURM_JOB_ID={job_id}"
        found = processes_with(f"SLURM_CONF={self.conf}", job)
        return {pid: command for pid, command in found.items() if "slurmstepd:" not in command}

    # -- clients ---------------------------------------------------------------------------------

    def run(
        self,
        *command: str | os.PathLike[str],
        check: bool = True,
        timeout_s: float = 60.0,
        stdin: str | None = None,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the environment of the cluster; `env` is added to it."""
        done = subprocess.run(
            [os.fspath(part) for part in command],
            input="" if stdin is None else stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=cwd,
            env={**self.env, **(env or {})},
        )
        if check and done.returncode != 0:
            raise SlurmClusterError(
                f"{' '.join(map(str, command))}: exit status {done.returncode}\n"
                f"{done.stdout}{done.stderr}"
            )
        return done

    def sbatch(
        self, script: str | os.PathLike[str], *options: str, env: Mapping[str, str] | None = None
    ) -> str:
        """Submit the text of a script (a str) or a script file (a Path); returns the job id."""
        if isinstance(script, str):
            done = self.run("sbatch", "--parsable", *options, stdin=script, env=env)
        else:
            done = self.run("sbatch", "--parsable", *options, script, env=env)
        return done.stdout.strip().split(";")[0]

    def job(self, job_id: str) -> list[dict[str, str]]:
        """What slurmctld knows of a job, one entry per array task; it forgets after 5 minutes."""
        done = self.run("scontrol", "--oneliner", "show", "job", job_id, check=False)
        if done.returncode != 0:
            return []
        return [_fields(line) for line in done.stdout.splitlines() if line.startswith("JobId=")]

    def wait_job(self, job_id: str, timeout_s: float = 60.0) -> str:
        """Wait until a job is over, with its node cleaned up, and return its state.

        For an array, the first state that is not COMPLETED.  A requeued job is not over.
        Asks slurmctld, so the answer does not depend on accounting.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            states = [entry["JobState"] for entry in self.job(job_id)]
            if not states:
                raise SlurmClusterError(f"slurmctld does not know job {job_id}")
            if all(state in FINAL_STATES for state in states):
                return next((state for state in states if state != "COMPLETED"), "COMPLETED")
            if time.monotonic() > deadline:
                raise SlurmClusterError(f"job {job_id} is {states} after {timeout_s:g} s")
            time.sleep(0.1)

    def sacct(
        self,
        job_id: str,
        fields: Sequence[str] = ("JobID", "State", "ExitCode"),
        *,
        duplicates: bool = False,
        settle_s: float = 10.0,
    ) -> list[dict[str, str]]:
        """The accounting rows of a job (job, batch, steps).

        sacct lags behind, so this asks again until all rows are over, for at most `settle_s`; give
        0 for a job that still runs.  A job of less than 5 s is known by its end only for a while
        (no partition, JobName `allocation`); that is waited for, too, when `fields` has anything
        that depends on it.  `duplicates` also gives the attempts before a requeue.
        """
        whole = any(field.lower() not in _END_FIELDS for field in fields)
        names = list(fields)
        command = ["sacct", "--noheader", "--parsable2", "--jobs", job_id]
        command += ["--duplicates"] if duplicates else []
        command += ["--format", ",".join(["JobID", "Partition", "State", *names])]
        over = {*FINAL_STATES, "REQUEUED"} if duplicates else FINAL_STATES
        deadline = time.monotonic() + settle_s
        while True:
            lines = self.run(*command).stdout.splitlines()
            rows = [line.split("|") for line in lines if line]
            settled = bool(rows) and all(
                state.split()[0] in over and bool(not whole or partition or "." in row_id)
                for row_id, partition, state, *_ in rows
            )
            if settled or time.monotonic() >= deadline:
                return [dict(zip(names, row[3:], strict=True)) for row in rows]
            time.sleep(0.2)

    def squeue(self) -> list[str]:
        """Ids of all jobs that wait, run or are being cleaned up."""
        return self.run("squeue", "--noheader", "--format=%i").stdout.split()

    def nodes_idle(self) -> bool:
        """Whether all nodes are up and without a job."""
        done = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", check=False)
        nodes = [line.split() for line in done.stdout.splitlines()]
        idle = {row[0] for row in nodes if len(row) == 2 and row[1] == "idle"}
        return done.returncode == 0 and idle == set(self.node_names)

    def clear(self, timeout_s: float = 30.0) -> None:
        """Kill all jobs, processes that outlived theirs included; wait until all nodes are idle.

        For the time between two tests.  Resumes nodes that a test left down or drained.
        """
        deadline = time.monotonic() + timeout_s
        jobs = self.squeue()
        if jobs:
            self.run("scancel", *jobs, check=False)
        while True:
            # Not left to scancel: its SIGKILL comes after KillWait, and misses orphans.
            left = self.job_processes()
            _kill(left)
            jobs = self.squeue()
            if not jobs and not left:
                if self.nodes_idle():
                    return
                nodes = f"nodename={','.join(self.node_names)}"
                self.run("scontrol", "update", nodes, "state=resume", check=False)
            if time.monotonic() > deadline:
                nodes = self.run("sinfo", "--Node", "--long").stdout
                raise SlurmClusterError(f"not idle after {timeout_s:g} s: {jobs} {left}\n{nodes}")
            time.sleep(0.1)


def _die_with_parent() -> None:
    # For the case that the test process itself is killed and can't clean up.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _write_private(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as out:
        out.write(data)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_ports(count: int) -> list[int]:
    """Free ports outside the range from which the kernel serves connections and srun."""
    low = 32768
    with contextlib.suppress(OSError, ValueError):
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(10000, low) if low > 11000 else range(20000, 60000)
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(candidates, len(candidates)):
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            ports.append(port)
            if len(ports) == count:
                return ports
    raise SlurmClusterError("no free ports")


def _fields(line: str) -> dict[str, str]:
    """`Key=value Key=value ...`; a word without `=` belongs to the value before it."""
    fields: dict[str, str] = {}
    last = ""
    for word in line.split(" "):
        key, equals, value = word.partition("=")
        if equals and key.replace(":", "").replace("/", "").isalnum():
            last = key
            fields[key] = value
        elif last:
            fields[last] += f" {word}"
    return {key: value.strip() for key, value in fields.items()}


def processes_with(*variables: str) -> dict[int, str]:
    """Living processes that were started with all these `NAME=value`, and their descendants.

    A plain `NAME` stands for any value.

    The descendants are for a child that was given another environment.  This process and those
    above it never count.
    """
    wanted = {os.fsencode(text) for text in variables}
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    found: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        pid = int(entry)
        with contextlib.suppress(OSError):  # ended while we looked
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            parents[pid] = int(stat.rpartition(")")[2].split()[1])
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if command:  # a zombie has none
                commands[pid] = command.replace(b"\0", b" ").decode(errors="replace").strip()
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if wanted <= {*environ, *(item.partition(b"=")[0] for item in environ)}:
                    found.add(pid)

    def line(pid: int) -> list[int]:
        """The process and those above it."""
        pids: list[int] = []
        while pid > 0 and pid not in pids:
            pids.append(pid)
            pid = parents.get(pid, 0)
        return pids

    spared = set(line(os.getpid()))
    found -= spared
    return {
        pid: command
        for pid, command in commands.items()
        if pid not in spared and not found.isdisjoint(line(pid))
    }
