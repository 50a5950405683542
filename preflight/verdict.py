"""The whole preflight of a Plan: findings, estimate, accepted or refused."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtlaunch.preflight.plan import Plan, show_version
from mtlaunch.preflight.rule import Finding, run_rules
from mtlaunch.preflight.yaml_text import JobFileError

if TYPE_CHECKING:
    from mtlaunch.preflight.memory import Estimate

CHECK_SCHEMA = "mtlaunch.check/1"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `check` says. A finding of severity error refuses the job."""

    plan: Plan
    findings: tuple[Finding, ...]
    estimate: Estimate | None

    @property
    def refused(self) -> bool:
        return any(finding.level == "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": CHECK_SCHEMA,
            "file": self.plan.file,
            "verdict": "refused" if self.refused else "accepted",
            "findings": [_finding_json(finding) for finding in self.findings],
            "estimate": None if self.estimate is None else self.estimate.to_json(),
            "assumed_versions": assumed_versions(self.plan),
        }


def check(plan: Plan, select: Collection[str] = (), ignore: Collection[str] = ()) -> Verdict:
    """Run the rules and the estimate on a Plan.

    `select` and `ignore` take rule ids or family prefixes and act before the verdict.
    """
    from mtlaunch.preflight.memory import estimate

    return Verdict(plan, tuple(run_rules(plan, select, ignore)), estimate(plan))


def assumed_versions(plan: Plan) -> dict[str, str | None]:
    """The versions whose rules were applied, None where no version was known."""
    versions = {
        "megatron_core": plan.megatron_core,
        "torch": plan.torch,
        "transformer_engine": plan.transformer_engine,
    }
    return {name: show_version(value) if value else None for name, value in versions.items()}


def error_json(schema: str, error: JobFileError) -> dict[str, Any]:
    """A job file that cannot be read, as a document of the schema that was asked for."""
    problems = [
        {
            "message": problem.message,
            "hint": problem.hint,
            "where": {
                "file": problem.place.file,
                "line": problem.place.line,
                "column": problem.place.column,
            },
        }
        for problem in error.problems
    ]
    return {"schema": schema, "error": {"message": str(error), "problems": problems}}


def _finding_json(finding: Finding) -> dict[str, Any]:
    where = finding.where
    return {
        "id": finding.id,
        "name": finding.rule.name if finding.rule else "",
        "severity": finding.level,
        "message": finding.message,
        "hint": finding.hint,
        "option": finding.option,
        "where": None
        if where is None
        else {"file": where.file, "line": where.line, "column": where.column},
        "source": finding.rule.source if finding.rule else "",
    }
