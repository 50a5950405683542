"""examples/tiny-lora/train.py, unmodified, with LoRA attached from outside."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytestmark = pytest.mark.train

HERE = Path(__file__).parent
INJECTED = HERE / "programs" / "injected.py"
TRAIN = HERE.parents[1] / "examples" / "tiny-lora" / "train.py"

SMALL = [
    *("--hidden-size", "64", "--seq-length", "32", "--max-position-embeddings", "32"),
    *("--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "8"),
    *("--log-interval", "1", "--lr", "1e-2"),
]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
LORA = {"dim": 4, "alpha": 8}


def losses(stdout: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", stdout)]


def reported(stderr: str) -> dict:
    [line] = re.findall(r"^REPORT (.*)$", stderr, flags=re.MULTILINE)
    return json.loads(line)["lora"]


@pytest.fixture(scope="module")
def train(run_ranks):
    """train(variant or None, *more flags) -> the run of a tiny GPT on two ranks, or more."""
    done = {}

    def train(variant, *flags, world_size=2):
        key = (variant, flags, world_size)
        if key not in done:
            if variant is None:
                done[key] = run_ranks(TRAIN, world_size, *SMALL, *TP2, *flags)
            else:
                settings = json.dumps({**LORA, "sequence_parallel": variant})
                done[key] = run_ranks(
                    INJECTED, world_size, settings, str(TRAIN), *SMALL, *TP2, *flags
                )
        return done[key]

    return train


def test_the_script_trains_alone(train):
    found = losses(train(None).stdout[0])
    assert len(found) == 8
    assert found[-1] < found[0] - 1.0


def test_lora_trains_and_regather_changes_no_loss(train):
    base, regather = (losses(train(variant).stdout[0]) for variant in ("base", "regather"))
    assert base == regather
    assert base[-1] < base[0] - 0.5


def test_gather_free_follows_base(train):
    base, found = (losses(train(variant).stdout[0]) for variant in ("base", "gather-free"))
    assert found == pytest.approx(base, abs=2e-5)


def test_first_loss_is_the_base_models(train):
    """LoRA-B is zero, and attaching draws none of the script's random numbers."""
    assert losses(train("base").stdout[0])[0] == losses(train(None).stdout[0])[0]


def test_every_rank_reports_its_decisions(train):
    why = "row-parallel: its LoRA-A input is not gathered"
    for stderr in train("regather").stderr:
        found = reported(stderr)
        assert sorted(found.pop("decisions"), key=lambda decision: decision["surface"]) == [
            {"surface": "linear_fc1", "count": 2, "uses": "regather"},
            {"surface": "linear_fc2", "count": 2, "uses": "base", "reason": why},
            {"surface": "linear_proj", "count": 2, "uses": "base", "reason": why},
            {"surface": "linear_qkv", "count": 2, "uses": "regather"},
        ]
        # A layer's shard: qkv 4/2*64 + 192/2*4, proj 4*64/2 + 64/2*4, fc1 4/2*64 + 256/2*4,
        # fc2 4*256/2 + 64/2*4.
        assert found.pop("trainable_parameters") == 2 * (512 + 256 + 640 + 640)
        assert found.pop("frozen_parameters") > 50_000
        assert found == {
            "variant": "regather",
            "attached": 8,
            "variant_modules": 4,
            "fallback_modules": 4,
            "not_matched": [],
            "left_alone": [
                {"surface": "output_layer", "count": 1, "reason": "not a target module"}
            ],
        }


def test_rank_0_says_it_once(train):
    ranks = train("regather").stderr
    said = [re.findall(r"^\[mtlaunch\] (.*)$", text, flags=re.MULTILINE) for text in ranks]
    assert said == [
        [
            "LoRA dim 4 on 8 modules: 4 re-gather (linear_qkv 2, linear_fc1 2), "
            "4 on the base path (linear_proj 2, linear_fc2 2; row-parallel: its LoRA-A input is "
            "not gathered)"
        ],
        [],
    ]


def test_data_parallel_with_overlapped_gradient_reduction(train):
    """Four ranks, TP2 and DP2: Megatron's hooks want a gradient for every LoRA weight."""
    flags = ("--overlap-grad-reduce", "--train-iters", "4")
    found = losses(train("regather", *flags, world_size=4).stdout[0])
    assert len(found) == 4
    assert found[-1] < found[0]


def test_full_recompute_falls_back_and_trains_alike(train):
    flags = ("--recompute-granularity", "full", "--recompute-method", "uniform")
    ranks = train("regather", *flags, "--recompute-num-layers", "1")
    assert reported(ranks.stderr[0])["variant_modules"] == 0
    expected = losses(train("base").stdout[0])
    assert losses(ranks.stdout[0]) == pytest.approx(expected, abs=2e-5)


def test_one_rank_that_imports_megatron_after_the_hook(run_ranks):
    """A process of its own: in the other runs megatron is imported before."""
    settings = json.dumps({**LORA, "sequence_parallel": "gather-free"})
    ranks = run_ranks(INJECTED, 1, settings, str(TRAIN), *SMALL, "--train-iters", "2", cold=True)
    assert len(losses(ranks.stdout[0])) == 2
    found = reported(ranks.stderr[0])
    assert (found["attached"], found["variant_modules"]) == (8, 0)
    assert {decision["reason"] for decision in found["decisions"]} == {
        "tensor-parallel size 1: no input to gather"
    }


@pytest.mark.parametrize(
    "targets, message",
    [
        (
            ["linear_q"],
            r"none of lora.target_modules \(linear_q\) is a layer that takes an adapter",
        ),
        (["router"], r"This model has: linear_fc1, linear_fc2, linear_proj, linear_qkv, output_l"),
    ],
)
def test_no_target_is_an_error(run_ranks, targets, message):
    settings = json.dumps({**LORA, "target_modules": targets})
    with pytest.raises(pytest.fail.Exception, match=message):
        run_ranks(INJECTED, 1, settings, str(TRAIN), *SMALL)


def test_patterns_choose_layers(run_ranks):
    targets = ["*.layers.1.*.linear_qkv", "linear_fc2", "linear_kv"]
    settings = json.dumps({**LORA, "target_modules": targets, "sequence_parallel": "regather"})
    ranks = run_ranks(INJECTED, 2, settings, str(TRAIN), *SMALL, *TP2, "--train-iters", "1")
    found = reported(ranks.stderr[0])
    counts = {decision["surface"]: decision["count"] for decision in found["decisions"]}
    assert counts == {"linear_qkv": 1, "linear_fc2": 2}
    assert found["not_matched"] == ["linear_kv"]
    assert {alone["surface"]: alone["count"] for alone in found["left_alone"]} == {
        "linear_qkv": 1,
        "linear_proj": 2,
        "linear_fc1": 2,
        "output_layer": 1,
    }
