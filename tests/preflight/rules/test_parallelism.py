"""PAR and DAT: sizes against the world, heads, groups, experts and the batch."""

from __future__ import annotations

import re
from typing import Any

import pytest


def sizes(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "num-layers": 12,
        "tensor-model-parallel-size": tp,
        "pipeline-model-parallel-size": pp,
        "context-parallel-size": cp,
        "expert-model-parallel-size": ep,
        **more,
    }


def ids(findings: list[Any]) -> list[str]:
    return [finding.id for finding in findings]


# -- PAR001 ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nodes, args, option",
    [
        (1, sizes(pp=3), "pipeline-model-parallel-size"),
        (3, sizes(tp=16), "tensor-model-parallel-size"),
        (1, sizes(tp=4, cp=4), "context-parallel-size"),
        (1, sizes(tp=16), "tensor-model-parallel-size"),
    ],
)
def test_world(plan: Any, found: Any, nodes: int, args: dict[str, Any], option: str) -> None:
    [finding] = found(plan(args, nodes=nodes), "PAR")
    assert (finding.id, finding.option) == ("PAR001", option)
    for value in map(int, re.findall(r"\d+", finding.hint.split(",")[0])):
        assert found(plan(args, nodes=value), "PAR") == []


def test_world_message(plan: Any, found: Any) -> None:
    [finding] = found(plan(sizes(tp=2, pp=3), nodes=4), "PAR")
    assert finding.message == "32 GPUs do not divide by TP 2 x PP 3 = 6"
    assert finding.hint == "use slurm.nodes: 3 or 6, or sizes whose product divides 32"


@pytest.mark.parametrize("args", [{}, sizes(tp=8), sizes(tp=2, pp=2, cp=2), sizes()])
def test_world_silent(plan: Any, found: Any, args: dict[str, Any]) -> None:
    assert found(plan(args), "PAR") == []


# -- PAR002 ------------------------------------------------------------------------------------

GRID = sizes(tp=4, ep=4, **{"num-experts": 128})


def test_expert_grid(plan: Any, found: Any) -> None:
    [finding] = found(plan(GRID), "PAR")
    assert finding.id == "PAR002"
    assert finding.message == (
        "8 GPUs do not divide by the experts' grid ETP 4 x EP 4 x PP 1 = 16; "
        "--expert-tensor-parallel-size is not given, so ETP is TP"
    )
    assert finding.hint == (
        "use --expert-tensor-parallel-size 1, or --expert-model-parallel-size 1 or 2"
    )
    for fix in (
        {"expert-tensor-parallel-size": 1},
        {"expert-model-parallel-size": 1},
        {"expert-model-parallel-size": 2},
    ):
        assert found(plan({**GRID, **fix}), "PAR") == []


def test_expert_grid_of_bridge_defaults_to_one(plan: Any, found: Any) -> None:
    assert found(plan(GRID, framework="megatron-bridge"), "PAR") == []
    given = {**GRID, "expert-tensor-parallel-size": 4}
    [finding] = found(plan(given, framework="megatron-bridge"), "PAR")
    assert "not given" not in finding.message


def test_one_cause_one_finding(plan: Any, found: Any) -> None:
    assert ids(found(plan(sizes(tp=16, ep=3)), "PAR")) == ["PAR001"]


# -- PAR003, PAR004 ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "heads, groups, tp, expected",
    [
        (14, None, 4, ["PAR003"]),
        (14, None, 2, []),
        (12, 3, 4, ["PAR004"]),
        (12, 2, 4, []),  # replicated
        (12, 6, 4, ["PAR004"]),
        (12, 4, 4, []),
        (14, 3, 4, ["PAR003"]),
        (None, None, 8, []),
    ],
)
def test_heads_and_groups(
    plan: Any, found: Any, heads: int | None, groups: int | None, tp: int, expected: list[str]
) -> None:
    args = sizes(tp=tp)
    if heads:
        args["num-attention-heads"] = heads
    if groups:
        args |= {"group-query-attention": True, "num-query-groups": groups}
    findings = found(plan(args), "PAR")
    assert ids(findings) == expected
    for finding in findings:
        values = finding.hint.removeprefix("use --tensor-model-parallel-size ")
        for value in map(int, re.findall(r"\d+", values)):
            assert found(plan({**args, "tensor-model-parallel-size": value}), "PAR") == []


def test_groups_are_the_heads_without_the_flag(plan: Any, found: Any) -> None:
    args = sizes(tp=4, **{"num-attention-heads": 12, "num-query-groups": 3})
    assert found(plan(args), "PAR") == []


# -- DAT001 ------------------------------------------------------------------------------------


def batch(gbs: int | None, mbs: int | None = 2, **more: Any) -> dict[str, Any]:
    return {**sizes(tp=8), "global-batch-size": gbs, "micro-batch-size": mbs, **more}


@pytest.mark.parametrize("gbs, values", [(516, (512, 520)), (4, (8, 16)), (12, (8, 16))])
def test_batch_hints_pass(plan: Any, found: Any, gbs: int, values: tuple[int, int]) -> None:
    [finding] = found(plan(batch(gbs), nodes=4), "DAT")
    assert finding.hint == "use --global-batch-size {} or {}".format(*values)
    assert all(found(plan(batch(value), nodes=4), "DAT") == [] for value in values)


def test_batch_message(plan: Any, found: Any) -> None:
    [finding] = found(plan(batch(516), nodes=4), "DAT")
    assert (finding.id, finding.option) == ("DAT001", "global-batch-size")
    assert finding.message == (
        "516 does not split into micro-batches of 2 over 4 data-parallel ranks (2 x 4 = 8)"
    )


@pytest.mark.parametrize(
    "args",
    [
        batch(512),
        batch(None),
        batch(516, None),
        batch(516, **{"step-batch-size-schedule": "0:8 100:16"}),
        batch(516, **{"tensor-parallel-num-weight-shards": 16}),
        {**batch(515), "tensor-model-parallel-size": 3},  # left to PAR001
    ],
)
def test_batch_silent(plan: Any, found: Any, args: dict[str, Any]) -> None:
    assert found(plan(args, nodes=4), "DAT") == []


DECREASE = {"decrease-batch-size-if-needed": True}


@pytest.mark.parametrize(
    "gbs, more, version, fires",
    [
        (516, DECREASE, "0.18", False),
        (516, DECREASE, "0.19", True),  # evaluation takes the global batch as it is
        (512, DECREASE, "0.19", False),
        (516, {**DECREASE, "eval-global-batch-size": 512}, "0.19", False),
        (4, DECREASE, "0.18", True),  # not one micro-batch a rank is left
    ],
)
def test_a_batch_that_megatron_rounds_down(
    plan: Any, found: Any, gbs: int, more: dict[str, Any], version: str, fires: bool
) -> None:
    job = plan(batch(gbs, **more), nodes=4, cluster={"megatron_core": version})
    findings = found(job, "DAT")
    assert ids(findings) == ["DAT001"] * fires
    if fires:
        assert ("does not help" in findings[0].message) == (gbs > 8)


def test_ramp_up_counts_from_019_on(plan: Any, found: Any) -> None:
    args = batch(516, **{"rampup-batch-size": ["8", "8", "100"]})
    assert ids(found(plan(args, nodes=4, cluster={"megatron_core": "0.18"}), "DAT")) == []
    assert ids(found(plan(args, nodes=4, cluster={"megatron_core": "0.19"}), "DAT")) == ["DAT001"]
