"""A process that has imported torch and megatron-core already and forks ranks on request.

Importing them takes longer than most of the runs. One request a line on stdin, as JSON:

    {"argv": [program, ...], "environments": [{...} per rank], "logs": folder, "timeout_s": 60}

and one answer a line on stdout: the ranks' exit codes. Rank i writes logs/i.out and logs/i.err.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import runpy
import sys
import time
from typing import Any

PRELOADED = (
    "torch.distributed",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
)


def run_rank(argv: list[str], environment: dict[str, str], log: str) -> None:
    for descriptor, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(log + suffix, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
    os.environ.update(environment)
    sys.argv = argv
    sys.path[0] = os.path.dirname(argv[0])
    runpy.run_path(argv[0], run_name="__main__")


def run(request: dict[str, Any]) -> list[int | None]:
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(
            target=run_rank,
            args=(request["argv"], environment, os.path.join(request["logs"], str(rank))),
        )
        for rank, environment in enumerate(request["environments"])
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + request["timeout_s"]
    # One rank that fails leaves the others waiting in a collective.
    while (
        any(rank.is_alive() for rank in ranks)
        and not any(rank.exitcode for rank in ranks)
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    for rank in ranks:
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
