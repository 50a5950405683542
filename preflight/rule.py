"""Rules: one function each, found by its registration.

A rule reads a Plan and yields Findings. What it cannot decide it stays silent on. Its docstring is
its documentation page.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from mtlaunch.preflight.plan import Plan, Version
from mtlaunch.preflight.yaml_text import Place

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

FAMILIES = {
    "PAR": "parallelism",
    "PIP": "pipeline",
    "MOE": "mixture of experts",
    "CTX": "context parallel",
    "PRC": "precision",
    "RCP": "recompute",
    "OFF": "offload",
    "ENV": "environment and communication",
    "GRF": "CUDA graphs",
    "OPT": "optimizer and DDP",
    "FSD": "FSDP",
    "PEF": "PEFT",
    "DAT": "data and batch",
    "CKP": "checkpoint",
    "SLM": "Slurm and launch",
    "MEM": "memory",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found: the option at fault, value and limit in `message`, the fix in `hint`.

    `option` is a canonical flag, or `env.NAME`, `slurm.OPTION`, `lora.KEY`, `cluster.KEY`; the
    place follows from it unless `where` says otherwise. `severity` None is the rule's own.
    """

    option: str
    message: str
    hint: str = ""
    severity: Severity | None = None
    where: Place | None = None
    rule: Rule | None = None

    @property
    def id(self) -> str:
        return self.rule.id if self.rule else ""

    @property
    def level(self) -> Severity:
        return self.severity or (self.rule.severity if self.rule else "error")


Check = Callable[[Plan], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A registered check. `since` and `until` bound megatron-core: since <= version < until."""

    id: str
    name: str
    severity: Severity
    source: str
    check: Check
    frameworks: tuple[str, ...] = ("megatron-lm", "megatron-bridge")
    since: Version | None = None
    until: Version | None = None

    @property
    def page(self) -> str:
        return self.check.__doc__ or ""

    def applies(self, plan: Plan) -> bool:
        if plan.framework not in self.frameworks:
            return False
        version = plan.megatron_core
        if self.since is not None and version[: len(self.since)] < self.since:
            return False
        return self.until is None or version[: len(self.until)] < self.until


_RULES: dict[str, Rule] = {}


def rule(
    id: str,
    name: str,
    severity: Severity,
    source: str,
    *,
    frameworks: tuple[str, ...] = ("megatron-lm", "megatron-bridge"),
    since: Version | None = None,
    until: Version | None = None,
) -> Callable[[Check], Check]:
    """Register a check under its id; ids are never reused."""

    def register(check: Check) -> Check:
        known = _RULES.get(id)
        if known is not None and known.check.__qualname__ != check.__qualname__:
            raise ValueError(f"rule id {id} is taken by {known.name}")
        if id[:3] not in FAMILIES:
            raise ValueError(f"rule id {id} is of no family")
        _RULES[id] = Rule(id, name, severity, source, check, frameworks, since, until)
        return check

    return register


@functools.cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule, by id. Modules of `rules/` are found, not listed."""
    from mtlaunch.preflight import rules

    for module in pkgutil.iter_modules(rules.__path__, rules.__name__ + "."):
        importlib.import_module(module.name)
    return tuple(_RULES[key] for key in sorted(_RULES))


def matches(id: str, patterns: Collection[str]) -> bool:
    """Whether an id is one of the patterns, which are ids or family prefixes ("MEM")."""
    return id in patterns or id[:3] in patterns


def run_rules(
    plan: Plan, select: Collection[str] = (), ignore: Collection[str] = ()
) -> Iterator[Finding]:
    """Findings of all rules that apply, errors first, then in the order of the file."""
    found = []
    for one in all_rules():
        if not one.applies(plan):
            continue
        if (select and not matches(one.id, select)) or matches(one.id, ignore):
            continue
        for finding in one.check(plan):
            where = finding.where or plan.place(finding.option)
            found.append(replace(finding, rule=one, where=where))
    found.sort(key=_order)
    yield from found


def _order(finding: Finding) -> tuple[int, int, int, str]:
    where = finding.where
    line, column = (where.line, where.column) if where else (0, 0)
    return SEVERITIES.index(finding.level), line, column, finding.id
