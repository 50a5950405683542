"""`srun` of a local job: the tasks of one node, with what the rendered script relies on.

Labelled output, SLURM_PROCID and the like for each task, `--kill-on-bad-exit`, and the highest
exit code of the tasks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

from mtlaunch.launcher.processes import descendants, die_with_parent, send, start_ticks
from mtlaunch.launcher.runner.report import write_json

_OUTPUT = threading.Lock()


def parse(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Options in the --name=value form, then the command."""
    options: dict[str, str] = {}
    for position, word in enumerate(arguments):
        if not word.startswith("--"):
            return options, arguments[position:]
        name, _, value = word.removeprefix("--").partition("=")
        options[name] = value
    return options, []


def task_environment(task: int, tasks: int) -> dict[str, str]:
    return {
        **os.environ,
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task),
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_ID": "0",
    }


def copy_lines(source: BinaryIO, label: bytes) -> None:
    for line in source:
        with _OUTPUT:
            sys.stdout.buffer.write(label + line + (b"" if line.endswith(b"\n") else b"\n"))
            sys.stdout.buffer.flush()


def main(arguments: list[str]) -> int:
    options, command = parse(arguments)
    if not command:
        print("srun (local): no command", file=sys.stderr)
        return 1
    die_with_parent()
    # A handler, not SIG_IGN, which the tasks would inherit.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    tasks = int(options.get("ntasks") or os.environ.get("SLURM_NTASKS", "1"))
    width = len(str(tasks - 1))
    running: dict[int, subprocess.Popen[bytes]] = {}
    copiers = []
    for task in range(tasks):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=task_environment(task, tasks),
            preexec_fn=die_with_parent,
        )
        running[task] = process
        label = f"{task:>{width}}: ".encode() if "label" in options else b""
        assert process.stdout is not None
        copier = threading.Thread(target=copy_lines, args=(process.stdout, label), daemon=True)
        copier.start()
        copiers.append(copier)
    pid = os.getpid()
    step = {"pid": pid, "start_ticks": start_ticks(pid)}
    write_json(Path(os.environ["MTLAUNCH_LOCAL_DIR"]) / "step.json", step)
    kill_on_bad_exit = options.get("kill-on-bad-exit", "0") != "0"
    code = wait_for(running, float(options["kill-wait"]) if kill_on_bad_exit else None)
    for copier in copiers:
        copier.join(timeout=5)  # a process that a rank left behind may hold its pipe
    return code


def wait_for(running: dict[int, subprocess.Popen[bytes]], kill_wait_s: float | None) -> int:
    """The highest exit code; with `kill_wait_s`, a task that fails ends the others."""
    highest = 0
    kill_at: float | None = None
    while running:
        for task, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[task]
            if code:
                how = f"Exited with exit code {code}" if code > 0 else signal.strsignal(-code)
                print(f"srun: error: task {task}: {how}", file=sys.stderr, flush=True)
            highest = max(highest, code if code >= 0 else 128 - code)
            if code and kill_wait_s is not None and kill_at is None and running:
                kill_at = time.monotonic() + kill_wait_s
                for other in running.values():
                    send([other.pid, *descendants(other.pid)], signal.SIGTERM)
        if kill_at is not None and time.monotonic() >= kill_at:
            for other in running.values():
                send([other.pid, *descendants(other.pid)], signal.SIGKILL)
        time.sleep(0.02)
    return highest


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
