"""Plans for the estimator's tests, made from a job file's parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from mtlaunch.preflight.jobfile import from_mapping
from mtlaunch.preflight.plan import Plan
from mtlaunch.preflight.resolve import resolve

PlanOf = Callable[..., Plan]


def make_plan(
    args: Mapping[str, Any],
    gpus: int = 1,
    gpu: str | None = "H100-80GB",
    nodes: int = 1,
    cluster: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Plan:
    """`gpus` a node; `sections` are other parts of the job file, e.g. model, env, lora."""
    job: dict[str, Any] = {
        "entrypoint": "pretrain_gpt.py",
        "slurm": {"nodes": nodes, "gpus_per_node": gpus},
        "cluster": {**({"gpu": gpu} if gpu else {}), **(cluster or {})},
        "args": dict(args),
        **sections,
    }
    return resolve(from_mapping(job))


@pytest.fixture(scope="session")
def plan_of() -> PlanOf:
    return make_plan
