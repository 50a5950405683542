"""PIP: how layers are cut. test_megatron_oracle.py asks Megatron; here stand cases and words."""

from __future__ import annotations

import re
from typing import Any

import pytest

EACH = "num-layers-per-virtual-pipeline-stage"
VIRTUAL = "num-virtual-stages-per-pipeline-rank"
LAYOUT = "pipeline-model-parallel-layout"
FIRST, LAST = "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"
EMBEDDING = "account-for-embedding-in-pipeline-split"
LOSS = "account-for-loss-in-pipeline-split"
BRIDGE = {"framework": "megatron-bridge"}


def cut(layers: int | None, pp: int, **more: Any) -> dict[str, Any]:
    args = {"num-layers": layers, "pipeline-model-parallel-size": pp}
    return args | {key.replace("_", "-"): value for key, value in more.items()}


def judge(plan: Any, found: Any, args: dict[str, Any], **job: Any) -> list[str]:
    job.setdefault("gpus", args["pipeline-model-parallel-size"])
    return [finding.id for finding in found(plan(args, **job))]


CASES = {
    # even
    "even": (cut(8, 4), []),
    "one layer too many": (cut(9, 4), ["PIP001"]),
    "fewer layers than stages": (cut(3, 4), ["PIP001"]),
    "embedding fills up": (cut(7, 4, **{EMBEDDING: True}), []),
    "embedding and loss fill up": (cut(6, 4, **{EMBEDDING: True, LOSS: True}), []),
    "embedding is one too many": (cut(8, 4, **{EMBEDDING: True}), ["PIP001"]),
    "hybrid pattern cuts by itself": (cut(9, 4, hybrid_layer_pattern="M-M|M-M"), []),
    "layers not known": (cut(None, 4), []),
    # virtual stages
    "virtual": (cut(16, 4, **{VIRTUAL: 2}), []),
    "virtual = layers of a stage": (cut(16, 4, **{VIRTUAL: 4}), []),
    "virtual above the layers of a stage": (cut(16, 4, **{VIRTUAL: 8}), ["PIP002"]),
    "virtual 3 of 4": (cut(16, 4, **{VIRTUAL: 3}), ["PIP002"]),
    "virtual 1 is none": (cut(20, 4, **{VIRTUAL: 1}), []),
    "each": (cut(16, 4, **{EACH: 2}), []),
    "each = the stage": (cut(16, 4, **{EACH: 4}), []),
    "each 3 of 4": (cut(16, 4, **{EACH: 3}), ["PIP002"]),
    "each above the stage": (cut(16, 4, **{EACH: 8}), ["PIP002"]),
    "virtual with the loss counted": (cut(15, 4, **{LOSS: True, VIRTUAL: 4}), []),
    "virtual with the loss not dividing": (cut(15, 4, **{LOSS: True, VIRTUAL: 3}), ["PIP002"]),
    "each with the loss not dividing": (cut(15, 4, **{LOSS: True, EACH: 3}), ["PIP002"]),
    "neither by PP nor by virtual": (cut(15, 4, **{VIRTUAL: 2}), ["PIP001"]),
    "virtual without pipeline": (cut(8, 1, **{VIRTUAL: 2}), ["PIP005"]),
    "virtual 1 without pipeline": (cut(8, 1, **{VIRTUAL: 1}), []),
    "each without pipeline": (cut(8, 1, **{EACH: 2}), ["PIP005"]),
    "each of all without pipeline": (cut(8, 1, **{EACH: 8}), []),
    "layout of two stages without pipeline": (cut(2, 1, **{LAYOUT: "Et|tL"}), ["PIP005"]),
    # uneven
    "first": (cut(10, 4, **{FIRST: 1}), []),
    "last": (cut(10, 4, **{LAST: 4}), []),
    "both": (cut(30, 4, **{FIRST: 7, LAST: 7}), []),
    "both of two": (cut(8, 2, **{FIRST: 3, LAST: 5}), []),
    "first zero": (cut(9, 4, **{FIRST: 0}), ["PIP004"]),
    "last negative": (cut(9, 4, **{LAST: -1}), ["PIP004"]),
    "rest does not divide": (cut(10, 4, **{FIRST: 2}), ["PIP004"]),
    "two stages not full": (cut(8, 2, **{FIRST: 4, LAST: 3}), ["PIP004"]),
    "ends hold more than there is": (cut(8, 4, **{FIRST: 5, LAST: 5}), ["PIP004"]),
    "nothing left for the middle": (cut(8, 4, **{FIRST: 4, LAST: 4}), ["PIP004"]),
    "last at PP 1": (cut(20, 1, **{LAST: 1}), ["PIP004"]),
    "last of all at PP 1": (cut(20, 1, **{LAST: 20}), []),
    "uneven virtual": (cut(12, 4, **{FIRST: 2, LAST: 2, VIRTUAL: 2}), []),
    "first not by virtual": (cut(11, 4, **{FIRST: 5, VIRTUAL: 2}), ["PIP003"]),
    "last not by virtual": (cut(13, 4, **{LAST: 1, VIRTUAL: 2}), ["PIP003"]),
    "rest does not divide, with virtual": (
        cut(7, 4, **{FIRST: 2, LAST: 2, VIRTUAL: 3}),
        ["PIP004"],
    ),
    "only the middle not by virtual": (cut(10, 4, **{FIRST: 2, LAST: 2, VIRTUAL: 2}), ["PIP003"]),
    "uneven with layers of each": (cut(8, 2, **{FIRST: 4, EACH: 2}), ["PIP007"]),
    "uneven and accounting": (cut(7, 2, **{FIRST: 3, LOSS: True}), ["PIP008"]),
    # flags together
    "two flags": (cut(8, 2, **{EACH: 2, VIRTUAL: 2}), ["PIP006"]),
    "layout and virtual": (cut(4, 2, **{LAYOUT: "Et|t|t|tL", VIRTUAL: 2}), ["PIP006"]),
    # layouts
    "layout": (cut(4, 2, **{LAYOUT: "Ett|ttL"}), []),
    "layout with repetitions": (
        cut(61, 16, **{LAYOUT: "Et*3|(tt|)*29,m|L", "mtp-num-layers": 1}),
        [],
    ),
    "layout without MTP flag": (cut(61, 16, **{LAYOUT: "Et*3|(tt|)*29,m|L"}), ["PIP014"]),
    "layout and first": (cut(4, 2, **{LAYOUT: "Ett|ttL", FIRST: 2}), ["PIP009"]),
    "layout and accounting": (cut(4, 2, **{LAYOUT: "Ett|ttL", LOSS: True}), ["PIP009"]),
    "unknown letter": (cut(4, 2, **{LAYOUT: "Ett|tdL"}), ["PIP010"]),
    "stages not by PP": (cut(4, 2, **{LAYOUT: "Et|tt|tL"}), ["PIP011"]),
    "an empty stage at the end": (cut(4, 2, **{LAYOUT: "Ett|ttL|"}), ["PIP011"]),
    "E not first": (cut(4, 2, **{LAYOUT: "tEt|ttL"}), ["PIP013"]),
    "two L": (cut(4, 2, **{LAYOUT: "EttL|ttL"}), ["PIP013"]),
    "t missing": (cut(5, 2, **{LAYOUT: "Ett|ttL"}), ["PIP014"]),
    "m missing": (cut(4, 2, **{LAYOUT: "Ett|ttL", "mtp-num-layers": 1}), ["PIP014"]),
    "m before t": (cut(4, 2, **{LAYOUT: "Ettm|ttL", "mtp-num-layers": 1}), ["PIP015"]),
    "m apart": (cut(4, 2, **{LAYOUT: "Ettttm|mL", "mtp-num-layers": 2}), ["PIP015"]),
    "m too early": (cut(4, 2, **{LAYOUT: "Ettt|tm||L", "mtp-num-layers": 1}), ["PIP015"]),
}


@pytest.mark.parametrize("args, expected", CASES.values(), ids=CASES)
def test_one_cause_is_one_finding(
    plan: Any, found: Any, args: dict[str, Any], expected: list[str]
) -> None:
    assert judge(plan, found, args) == expected


def test_bridge_differs_in_the_flags_only(plan: Any, found: Any) -> None:
    layout = {LAYOUT: "Et|t|t|tL", VIRTUAL: 2}
    assert judge(plan, found, cut(4, 2, **layout), **BRIDGE) == []
    assert judge(plan, found, cut(4, 2, **layout | {VIRTUAL: 4}), **BRIDGE) == ["PIP012"]
    assert judge(plan, found, cut(8, 1, **{VIRTUAL: 1}), **BRIDGE) == ["PIP005"]
    field = {"model.virtual_pipeline_model_parallel_size": 3}
    assert judge(plan, found, cut(16, 4) | field, **BRIDGE) == ["PIP002"]
    stages = {"model.num_layers_in_first_pipeline_stage": 3}
    assert judge(plan, found, cut(16, 4) | stages, **BRIDGE) == ["PIP004"]
    lists = [["embedding", "decoder"], ["decoder", "loss"]]
    assert judge(plan, found, cut(2, 2, **{LAYOUT: lists}), **BRIDGE) == []
    assert judge(plan, found, cut(3, 2, **{LAYOUT: lists}), **BRIDGE) == ["PIP014"]


# -- messages and their fixes ------------------------------------------------------------------


def test_layers_by_pipeline_message(plan: Any, found: Any) -> None:
    [finding] = found(plan(cut(30, 4), gpus=4))
    assert finding.option == "num-layers"
    assert finding.message == (
        "30 layers do not divide by PP 4: 30 = 4 x 7 + 2, and old Megatron dropped the 2 in silence"
    )
    assert finding.hint == (
        "use --decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7 (and 8 on "
        "each stage between), or --pipeline-model-parallel-size 1 or 2"
    )
    for pp in (1, 2):
        assert judge(plan, found, cut(30, pp), gpus=4) == []
    assert judge(plan, found, cut(30, 4, **{FIRST: 7, LAST: 7})) == []


def test_uneven_hint_keeps_virtual_stages(plan: Any, found: Any) -> None:
    """4 + 6 * 8 + 8 = 60, every stage a multiple of 4 virtual stages."""
    args = cut(60, 8, **{VIRTUAL: 4, "micro-batch-size": 1, "global-batch-size": 512})
    [finding] = found(plan(args, nodes=8))
    assert finding.hint.startswith(
        "use --decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 8 (and 8 on "
        "each stage between), or --pipeline-model-parallel-size 1, 2 or 4 without --num-virtual-"
    ), finding.hint
    assert judge(plan, found, args | {FIRST: 4, LAST: 8}, nodes=8, gpus=8) == []


def test_accounting_message(plan: Any, found: Any) -> None:
    [finding] = found(plan(cut(80, 4, **{LOSS: True}), gpus=4))
    assert finding.message.startswith("81 layers (80, and the loss counted as one each) do not")
    assert f"without --{LOSS}" in finding.hint


def test_layers_of_each_message(plan: Any, found: Any) -> None:
    [finding] = found(plan(cut(80, 16, **{EACH: 2}), nodes=2))
    assert (finding.id, finding.option) == ("PIP002", EACH)
    assert finding.message == (
        "5 layers per stage (80 layers over PP 16) cannot be cut in chunks of 2; old Megatron "
        "trained without 16 layers in silence"
    )
    assert finding.hint == f"use --{EACH} 1 or 5, or leave it out"
    for each in (1, 5, None):
        assert found(plan(cut(80, 16, **{EACH: each}), nodes=2)) == []


@pytest.mark.parametrize("layers, pp, virtual", [(80, 4, 3), (48, 6, 5), (96, 8, 7), (30, 5, 4)])
def test_virtual_stage_hints_pass(
    plan: Any, found: Any, layers: int, pp: int, virtual: int
) -> None:
    [finding] = found(plan(cut(layers, pp, **{VIRTUAL: virtual}), gpus=pp))
    values = [int(v) for v in re.findall(r"\d+", finding.hint.partition(", or leave")[0])]
    assert values == [v for v in range(1, layers // pp + 1) if layers // pp % v == 0]
    for value in values:
        assert judge(plan, found, cut(layers, pp, **{VIRTUAL: value})) == []


@pytest.mark.parametrize(
    "args, message",
    [
        (cut(8, 2, **{FIRST: 4, LAST: 3}), f"--{FIRST} 4 and --{LAST} 3 make 7 layers, and num-"),
        (
            cut(10, 4, **{FIRST: 2}),
            f"--{FIRST} 2 leaves 8 of 10 layers for the other 3 stages, which do not divide",
        ),
        (cut(20, 1, **{LAST: 1}), f"--{LAST} 1 with PP 1: there is one stage, of all 20 layers"),
        (cut(9, 4, **{FIRST: 0}), "0 layers; a stage has at least 1"),
        (cut(11, 4, **{FIRST: 5, VIRTUAL: 2}), "5 on the first stage: not a multiple of 2 virtual"),
        (cut(5, 2, **{LAYOUT: "Ett|ttL"}), "the layout places 4 decoder layers, num-layers is 5"),
        (cut(4, 2, **{LAYOUT: "Et|tt|tL"}), "3 stages do not divide by PP 2"),
        (cut(4, 2, **{LAYOUT: "Ett|tdL"}), "'Ett|tdL': 'd' is none of E (embedding), t (decoder)"),
        (cut(4, 2, **{LAYOUT: "Ett|tt"}), "'Ett|tt': 0 times L; L (loss) stands once, last of all"),
        (cut(8, 2, **{EACH: 2, VIRTUAL: 2}), f"--{EACH} and --{VIRTUAL} are both given"),
    ],
)
def test_messages(plan: Any, found: Any, args: dict[str, Any], message: str) -> None:
    [finding] = found(plan(args, gpus=args["pipeline-model-parallel-size"]))
    assert finding.message.startswith(message), finding.message
    assert finding.hint


def test_num_virtual_stages_for_uneven(plan: Any, found: Any) -> None:
    args = cut(8, 2, **{FIRST: 4, EACH: 2})
    [finding] = found(plan(args, gpus=2))
    assert finding.hint == f"use --{VIRTUAL} 2 in its place"
    assert judge(plan, found, cut(8, 2, **{FIRST: 4, VIRTUAL: 2})) == []


# -- microbatches ------------------------------------------------------------------------------


def interleaved(gbs: int | None, **more: Any) -> dict[str, Any]:
    batch = {"micro-batch-size": 1, "global-batch-size": gbs}
    return cut(48, 6, **{VIRTUAL: 4}) | batch | more


def test_too_few_microbatches(plan: Any, found: Any) -> None:
    [finding] = found(plan(interleaved(24), nodes=6))
    assert (finding.id, finding.option) == ("PIP016", "global-batch-size")
    assert finding.message == (
        "3 microbatches a step (24 / (1 x DP 8)): interleaved PP 6 needs at least 6"
    )
    assert finding.hint == f"use --global-batch-size 48, or drop virtual stages (--{VIRTUAL})"
    assert found(plan(interleaved(48), nodes=6)) == []
    assert found(plan(interleaved(24, **{VIRTUAL: None}), nodes=6)) == []


GROUP = "microbatch-group-size-per-virtual-pipeline-stage"


@pytest.mark.parametrize(
    "gbs, more, hinted",
    [
        (64, {}, (48, 96)),  # 8 microbatches
        (None, {}, (48,)),  # Megatron takes one microbatch
        (112, {GROUP: 12}, (96, 144)),  # 14 = 12 + 2
        (144, {GROUP: 12}, None),  # 18 = 12 + 6
        (96, {}, None),
    ],
)
def test_microbatch_groups(
    plan: Any, found: Any, gbs: int | None, more: dict[str, Any], hinted: tuple[int, ...] | None
) -> None:
    findings = found(plan(interleaved(gbs, **more), nodes=6))
    assert [finding.id for finding in findings] == ["PIP016"] * (hinted is not None)
    for value in hinted or ():
        assert str(value) in findings[0].hint
        assert found(plan(interleaved(value, **more), nodes=6)) == []


def test_microbatches_of_a_batch_that_megatron_rounds_down(plan: Any, found: Any) -> None:
    for gbs, fires in ((47, True), (49, False)):  # 6 stages, 8 data-parallel ranks: 5 and 6
        args = interleaved(gbs, **{"decrease-batch-size-if-needed": True})
        findings = found(plan(args, nodes=6, cluster={"megatron_core": "0.18"}))
        assert [finding.id for finding in findings] == ["PIP016"] * fires


def test_a_group_below_pp(plan: Any, found: Any) -> None:
    [finding] = found(plan(interleaved(96, **{GROUP: 2}), nodes=6))
    assert finding.option == GROUP
    assert finding.message == "groups of 2 microbatches are smaller than PP 6"


@pytest.mark.parametrize(
    "args, job",
    [
        (interleaved(24, **{"micro-batch-size": None}), {}),
        (interleaved(24, **{"step-batch-size-schedule": "0:24 100:48"}), {}),
        (interleaved(None), BRIDGE),
    ],
)
def test_microbatches_silent(
    plan: Any, found: Any, args: dict[str, Any], job: dict[str, Any]
) -> None:
    assert found(plan(args, nodes=6, **job)) == []


def test_an_odd_batch_is_left_to_its_own_rule(plan: Any, found: Any) -> None:
    assert [f.id for f in found(plan(interleaved(25), nodes=6))] == ["DAT001"]


@pytest.mark.parametrize("pp, fires", [(2, True), (4, False)])
def test_no_overlap(plan: Any, found: Any, pp: int, fires: bool) -> None:
    args = cut(16, pp, **{VIRTUAL: 2, "no-overlap-p2p-communication": True})
    assert judge(plan, found, args) == ["PIP017"] * fires
    assert judge(plan, found, cut(16, pp, no_overlap_p2p_communication=True)) == []
