"""Every rule's page: its sections are there, its Bad fires that rule alone, its Good is clean."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from mtlaunch.preflight import jobfile, resolve
from mtlaunch.preflight.rule import Finding, Rule, all_rules, run_rules

SECTIONS = ["What it checks", "Why it fails", "Bad", "Good", "Stays silent"]
REFUSED = Path(__file__).parents[2] / "examples" / "refused"

RULES = [pytest.param(rule, id=rule.id) for rule in all_rules()]


def sections(rule: Rule) -> dict[str, str]:
    """The page's sections: headings stand at the margin, their text is indented."""
    found: dict[str, list[str]] = {}
    heading = None
    for line in inspect.cleandoc(rule.page).splitlines()[1:]:
        if line and not line.startswith(" "):
            heading = line
            found[heading] = []
        elif heading is not None:
            found[heading].append(line)
    return {name: inspect.cleandoc("\n" + "\n".join(lines)) for name, lines in found.items()}


def check(text: str) -> list[Finding]:
    return list(run_rules(resolve.resolve(jobfile.parse(text, "job.yaml"))))


@pytest.mark.parametrize("rule", RULES)
def test_page_is_complete(rule: Rule) -> None:
    first = inspect.cleandoc(rule.page).splitlines()[0]
    assert first.endswith(".") and len(first) > 20
    found = sections(rule)
    assert list(found) == SECTIONS
    assert all(found.values())
    assert rule.source and rule.name == rule.name.lower() and " " not in rule.name


@pytest.mark.parametrize("rule", RULES)
def test_bad_fires_this_rule_alone(rule: Rule) -> None:
    found = check(sections(rule)["Bad"])
    assert {finding.id for finding in found} == {rule.id}
    assert found[0].level == rule.severity
    for finding in found:
        assert finding.message and finding.hint
        assert finding.where is not None and finding.where.line > 0, finding


@pytest.mark.parametrize("rule", RULES)
def test_good_is_clean(rule: Rule) -> None:
    found = check(sections(rule)["Good"])
    assert not [f for f in found if f.level == "error" or f.id == rule.id]


EXPECTED = {
    "nccl-ub.yaml": ("ENV001", "PYTORCH_CUDA_ALLOC_CONF:"),
    "cuda-graphs.yaml": ("GRF001", "NCCL_GRAPH_REGISTER:"),
    "cpu-offload.yaml": ("OFF001", "cpu-offloading-num-layers:"),
    "vpp.yaml": ("PIP002", "num-virtual-stages-per-pipeline-rank:"),
    "does-not-fit.yaml": ("MEM001", ""),
}


def test_every_refused_example_is_tested() -> None:
    assert {path.name for path in REFUSED.glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_refused_examples_give_their_one_error(name: str) -> None:
    text = (REFUSED / name).read_text()
    id, line = EXPECTED[name]
    errors = [finding for finding in check(text) if finding.level == "error"]
    assert [finding.id for finding in errors] == [id]
    where = errors[0].where
    assert where is not None
    if line:
        assert text.splitlines()[where.line - 1].strip().startswith(line)
        assert where.column == 3
    assert f"Refused: {id}." in text.splitlines()[0]


REPAIRS = {
    "nccl-ub.yaml": ["env={}"],
    "cuda-graphs.yaml": ["env.NCCL_GRAPH_REGISTER=0"],
    "cpu-offload.yaml": ["args.cpu-offloading-num-layers=0"],
    "vpp.yaml": ["args.num-virtual-stages-per-pipeline-rank=5"],
    "does-not-fit.yaml": ["args.tensor-model-parallel-size=2", "args.sequence-parallel=true"],
}


@pytest.mark.parametrize("name", REPAIRS)
def test_repaired_examples_are_accepted(name: str) -> None:
    job = jobfile.parse((REFUSED / name).read_text(), name, REPAIRS[name])
    assert not [f for f in run_rules(resolve.resolve(job)) if f.level == "error"]
