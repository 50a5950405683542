"""`scancel --signal=TERM JOB` of a local job: a signal to every process of the step."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from mtlaunch.launcher.local_job import step_processes
from mtlaunch.launcher.processes import send


def main(arguments: list[str]) -> int:
    number = signal.SIGTERM
    for word in arguments:
        if word.startswith("--signal="):
            name = word.removeprefix("--signal=").removeprefix("SIG")
            number = signal.Signals[f"SIG{name}"]
    send(step_processes(Path(os.environ["MTLAUNCH_LOCAL_DIR"])), number)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
