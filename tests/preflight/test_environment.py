"""The environment block: values by policy, layers, what a user's setting does to it."""

from __future__ import annotations

from typing import Any

import pytest

from mtlaunch.preflight import environment
from mtlaunch.preflight.plan import Plan

CUDA, NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
ON = "expandable_segments:True"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
STREAMS = "TORCH_NCCL_AVOID_RECORD_STREAMS"
TP = {"num-layers": 4, "tensor-model-parallel-size": 2}


def values(plan: Plan) -> dict[str, str | None]:
    return {variable.name: variable.value for variable in environment.block(plan)}


def variable(plan: Plan, name: str) -> environment.Variable:
    [found] = [one for one in environment.block(plan) if one.name == name]
    return found


def test_default_block(plan: Any) -> None:
    assert values(plan({"num-layers": 4})) == {
        CUDA: ON,
        NEW: None,
        "NCCL_GRAPH_REGISTER": "0",
        CONNECTIONS: None,
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1",
        STREAMS: None,
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_CTA_POLICY": None,
        "NVTE_CPU_OFFLOAD_V1": None,
        "NCCL_ALGO": None,
        "CUBLAS_WORKSPACE_CONFIG": None,
    }


def test_every_variable_has_reason_and_source(plan: Any) -> None:
    for args in ({"num-layers": 4}, {**TP, "use-nccl-ub": True, "deterministic-mode": True}):
        for one in environment.policy_block(plan(args, cluster={"gpu": "H100-80GB"})):
            assert one.reason and one.source, one


@pytest.mark.parametrize(
    "args, job, name, value",
    [
        # user buffers
        ({"use-nccl-ub": True}, {}, CUDA, None),
        ({"use-nccl-ub": True}, {}, "NCCL_GRAPH_REGISTER", None),
        ({"use-nccl-ub": True}, {}, "NCCL_NVLS_ENABLE", "1"),
        ({"use-nccl-ub": True}, {}, "NCCL_CTA_POLICY", "1"),
        ({"use-sharp": True}, {}, "NCCL_NVLS_ENABLE", None),
        # hardware queues
        (TP, {"cluster": {"gpu": "H100-80GB"}}, CONNECTIONS, "1"),
        (TP, {"cluster": {"gpu": "A100-80GB"}}, CONNECTIONS, "1"),
        (TP, {}, CONNECTIONS, "1"),
        ({"context-parallel-size": 2}, {"cluster": {"gpu": "H200-141GB"}}, CONNECTIONS, "1"),
        (TP, {"cluster": {"gpu": "B200-192GB"}}, CONNECTIONS, "32"),
        ({}, {"cluster": {"gpu": "GB200-192GB"}}, CONNECTIONS, "32"),
        ({**TP, "use-megatron-fsdp": True}, {"cluster": {"gpu": "H100-80GB"}}, CONNECTIONS, "8"),
        ({"use-torch-fsdp2": True}, {"cluster": {"gpu": "B200-192GB"}}, CONNECTIONS, "8"),
        ({**TP, "overlap-moe-expert-parallel-comm": True}, {}, CONNECTIONS, "8"),
        (
            {"moe-flex-dispatcher-backend": "hybridep"},
            {"cluster": {"gpu": "H100-80GB"}},
            CONNECTIONS,
            "32",
        ),
        # determinism
        ({"deterministic-mode": True}, {}, "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"),
        ({"deterministic-mode": True}, {}, "NCCL_ALGO", "Ring"),
        ({"deterministic-mode": True}, {}, "CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        # versions of torch that read it
        ({}, {"cluster": {"torch": "2.7.1"}}, STREAMS, "1"),
        ({}, {"cluster": {"torch": "2.8.0"}}, STREAMS, None),
        ({}, {"cluster": {"torch": "2.13"}}, STREAMS, None),
        # offloading
        ({"fine-grained-activation-offloading": True}, {}, "NVTE_CPU_OFFLOAD_V1", "1"),
    ],
)
def test_policy(
    plan: Any, args: dict[str, Any], job: dict[str, Any], name: str, value: str | None
) -> None:
    assert values(plan({"num-layers": 4, **args}, **job))[name] == value


def test_user_buffers_are_said(plan: Any) -> None:
    one = variable(plan({"num-layers": 4, "use-nccl-ub": True}), CUDA)
    assert one.value is None and one.reason.startswith("left out: NCCL user buffers")


# -- layers ------------------------------------------------------------------------------------

LAYERS = {
    "site": {"cluster": {"env": {"NCCL_NVLS_ENABLE": "1"}}},
    "setup": {"setup": "export NCCL_NVLS_ENABLE=2"},
    "job": {"env": {"NCCL_NVLS_ENABLE": "3"}},
}


def test_later_layers_win(plan: Any) -> None:
    job: dict[str, Any] = {}
    assert variable(plan({}), "NCCL_NVLS_ENABLE").layer == "default"
    for expected, (layer, more) in enumerate(LAYERS.items(), 1):
        job |= more
        one = variable(plan({}, **job), "NCCL_NVLS_ENABLE")
        assert (one.value, one.layer, one.computed) == (str(expected), layer, "0")
        assert "mtlaunch would set 0: NVLS buffers cost GPU memory" in one.reason


def test_gpu_layer(plan: Any) -> None:
    assert variable(plan(TP, cluster={"gpu": "B200-192GB"}), CONNECTIONS).layer == "gpu"
    assert variable(plan(TP), CONNECTIONS).layer == "default"


def test_own_variables_follow_the_table(plan: Any) -> None:
    job = plan({}, env={"A": "1", "B": "job"}, cluster={"env": {"B": "site", "C": "3"}})
    own = environment.own_block(job)
    assert [(one.name, one.value, one.layer) for one in own] == [
        ("B", "job", "job"),
        ("C", "3", "site"),
        ("A", "1", "job"),
    ]
    assert environment.block(job)[-3:] == own


@pytest.mark.parametrize("line", ["export NCCL_DEBUG=INFO", "export NCCL_DEBUG=$LEVEL"])
def test_the_site_does_not_undo_what_setup_exports(plan: Any, line: str) -> None:
    """The block comes after setup:, and the job's layers win over the site's."""
    site = {"env": {"NCCL_DEBUG": "WARN", "B": "site"}}
    own = environment.own_block(plan({}, setup=[line], cluster=site))
    assert [one.name for one in own] == ["B"]
    own = environment.own_block(plan({}, setup=[line], cluster=site, env={"NCCL_DEBUG": "job"}))
    assert [(one.name, one.value) for one in own] == [("B", "site"), ("NCCL_DEBUG", "job")]


# -- the allocator's two names -----------------------------------------------------------------


@pytest.mark.parametrize(
    "env, value",
    [
        ({}, ON),
        ({CUDA: "max_split_size_mb:512"}, "max_split_size_mb:512"),
        ({CUDA: ""}, ""),
        ({NEW: "max_split_size_mb:512"}, f"{ON},max_split_size_mb:512"),
        ({NEW: "expandable_segments:False"}, "expandable_segments:False"),
        (
            {NEW: "max_split_size_mb:512", CUDA: ON},
            f"max_split_size_mb:512,{ON}",
        ),
        # equal options: the older name's count, as in PyTorch
        ({NEW: "max_split_size_mb:1", CUDA: "max_split_size_mb:2"}, "max_split_size_mb:2"),
        ({NEW: ON, CUDA: ""}, ON),
    ],
)
def test_both_names_become_one(plan: Any, env: dict[str, str], value: str) -> None:
    block = values(plan({"num-layers": 4}, env=env))
    assert block[CUDA] == value
    assert block[NEW] is None


def test_a_merge_is_said(plan: Any) -> None:
    job = plan({}, env={NEW: ON})
    assert "PYTORCH_ALLOC_CONF merged into it" in variable(job, CUDA).reason
    assert variable(job, NEW).reason.startswith("merged into PYTORCH_CUDA_ALLOC_CONF")


def test_graph_registration_follows_the_allocator(plan: Any) -> None:
    """NCCL_GRAPH_REGISTER=0 whenever, and only when, expandable segments are on."""
    for env, value in (
        ({}, "0"),
        ({CUDA: f"max_split_size_mb:512, {ON}"}, "0"),
        ({CUDA: "expandable_segments:False"}, None),
        ({CUDA: "max_split_size_mb:512"}, None),
        ({NEW: "max_split_size_mb:512"}, "0"),
    ):
        assert values(plan({}, env=env))["NCCL_GRAPH_REGISTER"] == value
