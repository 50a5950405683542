"""The resolved job file of a run directory: every value, with where it came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from mtlaunch.preflight.jobfile import Job
from mtlaunch.preflight.plan import Plan


def resolved_yaml(job: Job, plan: Plan, workdir: str, ignored_rules: tuple[str, ...] = ()) -> str:
    """A job file that can be submitted again, an origin behind each value."""
    lines = [f"# resolved from {job.file}"]
    if ignored_rules:
        lines.append(f"# submitted with --ignore {' '.join(ignored_rules)}")
    content = job.content.model_dump(exclude_unset=True, exclude={"args", "model", "slurm", "env"})
    content = {**content, "name": job.name, "workdir": workdir}
    lines += _entries(content, {})
    lines += _section("slurm", plan.slurm, plan, "slurm.")
    lines += _section("args", _arguments(job, plan), plan, "")
    lines += _section("env", plan.env, plan, "env.")
    return "\n".join(lines) + "\n"


def _arguments(job: Job, plan: Plan) -> dict[str, Any]:
    if plan.is_bridge:  # paths are kept: the bare field would be ambiguous
        return dict(job.content.args)
    return dict(plan.args)


def _section(name: str, mapping: Mapping[str, Any], plan: Plan, prefix: str) -> Iterator[str]:
    if not mapping:
        return
    yield f"{name}:"
    origins = {key: str(plan.place(prefix + key)) for key in mapping}
    for line in _entries(mapping, origins):
        yield f"  {line}"


def _entries(mapping: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    for key, value in mapping.items():
        text = yaml.safe_dump({key: value}, default_flow_style=None, width=10_000).rstrip("\n")
        first, *rest = text.split("\n")
        origin = origins.get(key)
        yield first + (f"  # {origin}" if origin and not rest else "")
        yield from rest
