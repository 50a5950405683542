"""Runs one rank: environment check, injection, recorder, then the user's unmodified script.

A small parent process forks before anything is imported, and waits. It is the parent that knows
the exit code, the signal and the peak resident memory of a rank that was killed. Slurm signals
every process of a step, so the parent ignores the signals that the script may want to handle
(TERM, INT, HUP, USR1, USR2) and lives as long as the script does.
"""

from __future__ import annotations

import builtins
import ctypes
import io
import json
import os
import resource
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from mtlaunch.launcher.runner.record import Slot
from mtlaunch.launcher.runner.recorder import Recorder, identity

# sysexits.h EX_CONFIG: the environment that arrived is not the one that was rendered
EXIT_ENVIRONMENT = 78

_OUTLIVED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# Of a value in a message: an environment variable may be long.
_SHOWN_CHARACTERS = 200


def say(text: str) -> None:
    print(f"[mtlaunch] {text}", file=sys.stderr, flush=True)


def rank_variables(environ: dict[str, str]) -> dict[str, str]:
    """RANK and the rest for a torch.distributed start: torchrun's own, or made from Slurm's."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return {}
    local_size = environ.get("SLURM_NTASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "1")
    return {
        "RANK": environ.get("SLURM_PROCID", "0"),
        "WORLD_SIZE": environ.get("SLURM_NTASKS", "1"),
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": local_size.split("(")[0].split(",")[0],
        "NODE_RANK": environ.get("SLURM_NODEID", "0"),
    }


def environment_differences(expected: dict[str, str | None], environ: dict[str, str]) -> list[str]:
    """What differs between the block as rendered and as it arrived, a sentence a variable."""
    differences = []
    for name, value in expected.items():
        arrived = environ.get(name)
        if value is None and arrived is not None:
            differences.append(f"{name} should be unset and is {_shown(arrived)}")
        elif value is not None and arrived is None:
            differences.append(f"{name} should be {_shown(value)} and is not set")
        elif value is not None and arrived is not None and arrived != value:
            differences.append(f"{name} should be {_shown(value)} and is {_shown(arrived)}")
    return differences


def _shown(value: str) -> str:
    text = repr(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}... ({len(value)} characters)"


def open_slot(run_dir: Path, launch: dict[str, Any], node: str, local_rank: int) -> Slot | None:
    attempt = os.environ.get("SLURM_RESTART_COUNT") or "0"
    path = run_dir / "records" / attempt / f"{node}.rec"
    try:
        return Slot(path, node, local_rank, int(launch["ranks_per_node"]))
    except OSError as error:
        say(f"no record for local rank {local_rank} on {node}: {path}: {error.strerror}")
        return None


def main(run_dir: Path) -> NoReturn:
    """Run the rank that this process is. Ends the process with the script's own exit code."""
    launch = json.loads((run_dir / "payload" / "launch.json").read_text())
    os.environ.update(rank_variables(dict(os.environ)))
    if "MTLAUNCH_LOCAL_DIR" in os.environ:
        # The local executor has no cgroup to end: torchrun's workers would outlive a killed agent.
        _die_with(os.getppid())
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    slot = open_slot(run_dir, launch, node, local_rank)

    # Signals that come while there are two processes and no handlers yet must wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, _OUTLIVED)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _die_with(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OUTLIVED)
        sys.exit(_script(launch, slot, rank, local_rank, node))
    end: dict[str, Any] = {"rank": rank, "local_rank": local_rank, "pid": child}
    handler = _outlive(child, _alone_signalled(), lambda: _note_term(slot, end))
    for number in _OUTLIVED:
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OUTLIVED)
    _, status, usage = os.wait4(child, 0)
    for number in _OUTLIVED:  # a handler that writes must not come between the halves of a write
        signal.signal(number, signal.SIG_IGN)
    _record_end(slot, {**end, **_ending(status, usage)})
    _end_like(status)


def _alone_signalled() -> bool:
    """Whether a signal to this rank reaches this process only.

    srun signals all processes of a step. torchrun signals the worker's process group, and only
    the process where the worker has none of its own.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getpgrp() != os.getpid()


def _outlive(child: int, forward: bool, note_term: Callable[[], None]) -> Any:
    """What the parent does with a signal that the script may want to handle."""

    def handle(number: int, frame: object) -> None:
        if forward:
            os.kill(child, number)
        if number == signal.SIGTERM:
            note_term()

    return handle


def _note_term(slot: Slot | None, end: dict[str, Any]) -> None:
    """Keep when the rank was first told to end.

    Written at once: SIGKILL may follow. It tells a rank that was ended because another one failed
    from the one that failed, whatever the script makes of TERM.
    """
    if "term_s" not in end:
        end["term_s"] = time.time()
        _record_end(slot, end)


def _die_with(parent: int) -> None:
    """SIGKILL of the waiting parent must not leave the script behind."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _script(
    launch: dict[str, Any], slot: Slot | None, rank: int, local_rank: int, node: str
) -> int | str | None:
    """The child: check, inject, record, run. Returns what the script exits with."""
    job_id = os.environ.get("SLURM_JOB_ID", "")
    recorder = Recorder(slot, identity(rank, local_rank, node, job_id=job_id))
    differences = environment_differences(launch["environment"], dict(os.environ))
    missing = [name for name in launch["secrets"] if name not in os.environ]
    differences += [f"{name} (a secret of the job file) is not set" for name in missing]
    if differences:
        for one in differences:
            say(f"rank {rank} on {node}: the environment did not arrive: {one}")
        say("a container image, a module of setup: or a wrapper changed it; the job ends here")
        error = "environment: " + "; ".join(differences)
        recorder.note({"error": error[:1000], "error_s": time.time(), "phase": "refused"})
        return EXIT_ENVIRONMENT
    if rank == 0:
        count = sum(value is not None for value in launch["environment"].values())
        say(f"environment block arrived: {count} variables as rendered")
    if launch["lora"]:
        from mtlaunch.kernels import inject

        inject.install(launch["lora"], lambda changed: recorder.note({"modules": changed}))
    recorder.start()
    return _run_user_script(launch, recorder)


def _run_user_script(launch: dict[str, Any], recorder: Recorder) -> int | str | None:
    sys.argv = [launch["entrypoint"], *launch["args"]]
    try:
        if launch["entrypoint_is_module"]:
            sys.path[0] = os.getcwd()  # as `python -m` does
            runpy.run_module(launch["entrypoint"], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(launch["entrypoint"]).resolve().parent)
            _run_file(os.path.join(os.getcwd(), launch["entrypoint"]))
    except SystemExit as end:
        return end.code
    except BaseException as error:
        recorder.note(
            {
                "error": f"{type(error).__name__}: {error}"[:1000],
                "error_s": time.time(),
                "oom": _is_out_of_memory(error),
                "traceback": traceback.format_exc()[-2000:],
            }
        )
        _print_traceback(error)
        recorder.sample()  # the allocator's peaks, with the teardown still to come
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run_file(path: str) -> None:
    """What `python FILE` does with a source file.

    runpy.run_path differs where scripts notice it: it puts the full path into sys.argv[0], and
    takes `__main__` away while the script's threads and atexit functions still run.
    """
    module = ModuleType("__main__")
    module.__dict__.update(
        __annotations__={},
        __builtins__=builtins,
        __cached__=None,
        __file__=path,
        __loader__=SourceFileLoader("__main__", path),
    )
    with io.open_code(path) as file:
        source = file.read()
    sys.modules["__main__"] = module
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def _is_out_of_memory(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"OutOfMemoryError", "MemoryError"})


def _print_traceback(error: BaseException) -> None:
    """As the interpreter would, by the script's own hook too, without our frames and runpy's."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    error = error.with_traceback(trace)
    sys.excepthook(type(error), error, trace)
    sys.stderr.flush()


def _is_ours(filename: str) -> bool:
    return filename in (__file__, runpy.__file__) or filename.startswith("<frozen runpy")


def _ending(status: int, usage: Any) -> dict[str, Any]:
    killed = os.WIFSIGNALED(status)
    return {
        "ended_s": time.time(),
        "exit_code": None if killed else os.WEXITSTATUS(status),
        "signal": os.WTERMSIG(status) if killed else None,
        "host_peak_bytes": usage.ru_maxrss * 1024,
    }


def _record_end(slot: Slot | None, content: dict[str, Any]) -> None:
    if slot is not None:
        try:
            slot.exit.write(content)
            slot.flush()
        except (OSError, ValueError) as error:
            say(f"rank {content['rank']}: exit not recorded: {error}")


def _end_like(status: int) -> NoReturn:
    """End as the script did: same code, or by the same signal, so that Slurm sees it."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the script's core is enough
        signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
        os.kill(os.getpid(), number)
        time.sleep(1)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1)
