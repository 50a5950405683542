"""Helpers of the preflight tests, as fixtures: pytest's importlib mode has no shared modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from mtlaunch.preflight import jobfile, resolve
from mtlaunch.preflight.plan import Plan
from mtlaunch.preflight.rule import Finding, run_rules

MakePlan = Callable[..., Plan]
Found = Callable[..., list[Finding]]


def make_plan(args: Mapping[str, Any] | None = None, **job: Any) -> Plan:
    """A Plan from job-file keys: `gpus` GPUs a node (8), or `slurm`; args in Megatron's words."""
    data: dict[str, Any] = {
        "slurm": {"nodes": job.pop("nodes", 1), "gpus_per_node": job.pop("gpus", 8)},
        "entrypoint": "pretrain_gpt.py",
        "args": dict(args or {}),
    }
    return resolve.resolve(jobfile.from_mapping({**data, **job}))


@pytest.fixture
def plan() -> MakePlan:
    return make_plan


@pytest.fixture
def found() -> Found:
    """Findings of a plan: `found(plan, "PIP")`, the memory verdict left out by default."""

    def run(plan: Plan, *select: str) -> list[Finding]:
        return list(run_rules(plan, select=select, ignore=() if select else ("MEM",)))

    return run
