"""ENV: the user's own variables against what PyTorch, NCCL and Megatron take."""

from __future__ import annotations

from typing import Any

import pytest

CUDA, NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
ON = "expandable_segments:True"
UB = {"num-layers": 4, "use-nccl-ub": True}


def ids(findings: list[Any], level: str | None = None) -> list[str]:
    return [f.id for f in findings if level is None or f.level == level]


# -- ENV001 ------------------------------------------------------------------------------------

FIRING = {
    "alone": {"env": {CUDA: ON}},
    "last in a list": {"env": {CUDA: f"max_split_size_mb:512,{ON}"}},
    "first in a list": {"env": {CUDA: f"{ON},max_split_size_mb:512"}},
    "blanks, which PyTorch strips": {"env": {CUDA: f"max_split_size_mb:512 , {ON} "}},
    "the last of two wins": {"env": {CUDA: f"expandable_segments:False,{ON}"}},
    "under the new name": {"env": {NEW: ON}},
    "new name fills in": {"env": {CUDA: "max_split_size_mb:512", NEW: ON}},
    "exported in setup": {"setup": [f"export {CUDA}={ON}"]},
    "exported with more": {"setup": [f"module load cuda; export A=1 {NEW}='{ON}'"]},
    "exported in a block": {"setup": f"module load cuda\nexport {CUDA}={ON}\n"},
    "exported after it is set": {"setup": [f"{CUDA}={ON}; export {CUDA}"]},
    "exported under a condition": {"setup": [f"if true; then export {CUDA}={ON}; fi"]},
    "exported by set -a": {"setup": ["set -a", f"{CUDA}={ON}"]},
    "blanks inside words, which PyTorch drops": {"env": {CUDA: "expandable_ segments:Tr ue"}},
    "the site's": {"cluster": {"env": {CUDA: ON}}},
}


@pytest.mark.parametrize("job", FIRING.values(), ids=FIRING)
def test_user_buffers_with_expandable_segments(plan: Any, found: Any, job: dict[str, Any]) -> None:
    assert ids(found(plan(UB, **job), "ENV"), "error") == ["ENV001"]


SILENT = {
    "computed block": {},
    "switched off": {"env": {CUDA: "expandable_segments:False"}},
    "something else": {"env": {CUDA: "max_split_size_mb:512"}},
    "the older name wins": {"env": {CUDA: "expandable_segments:False", NEW: ON}},
    "taken back": {"setup": [f"export {CUDA}={ON}", f"unset {CUDA}"]},
    "env wins over setup": {"env": {CUDA: "backend:native"}, "setup": [f"export {CUDA}={ON}"]},
    "setup wins over the site": {
        "setup": [f"export {CUDA}=backend:native"],
        "cluster": {"env": {CUDA: ON}},
    },
}


@pytest.mark.parametrize("job", SILENT.values(), ids=SILENT)
def test_user_buffers_without_expandable_segments(
    plan: Any, found: Any, job: dict[str, Any]
) -> None:
    assert "ENV001" not in ids(found(plan(UB, **job), "ENV"))


def test_no_user_buffers(plan: Any, found: Any) -> None:
    assert found(plan({"num-layers": 4, "use-nccl-ub": False}, env={CUDA: ON}), "ENV") == []


@pytest.mark.parametrize(
    "core, torch, level",
    [
        (None, None, "error"),  # an unknown torch counts as old
        ("0.19", None, "error"),
        ("0.19", "2.10.1", "error"),
        ("0.19", "2.11.0", "warning"),
        ("0.18", "2.11", "warning"),
        ("0.17.3", "2.11", "error"),
        ("0.17", "2.14", "error"),
        (None, "2.12", "warning"),
    ],
)
def test_versions(plan: Any, found: Any, core: str | None, torch: str | None, level: str) -> None:
    versions = {"megatron_core": core, "torch": torch}
    cluster = {key: value for key, value in versions.items() if value}
    [finding] = found(plan(UB, env={CUDA: ON}, cluster=cluster), "ENV")
    assert (finding.id, finding.level) == ("ENV001", level)


def test_user_buffer_message(plan: Any, found: Any) -> None:
    job = plan(UB, env={CUDA: ON}, cluster={"torch": "2.9"})
    [finding] = found(job, "ENV001")
    assert finding.option == f"env.{CUDA}"
    assert finding.message == (
        "env sets PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and --use-nccl-ub registers "
        "NCCL user buffers, which expandable segments cannot hold: Megatron refuses the two before "
        "megatron-core 0.18 (here 0.19) and before torch 2.11 (here 2.9)"
    )
    assert finding.hint == (
        "take expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF in env (mtlaunch's own "
        "setting leaves it out with user buffers), or drop --use-nccl-ub"
    )


@pytest.mark.parametrize("flag", ["ddp.nccl_ub", "comm_overlap.nccl_ub", "nccl_ub"])
def test_user_buffer_message_names_the_flag_as_written(plan: Any, found: Any, flag: str) -> None:
    job = plan({flag: True}, framework="megatron-bridge", setup=f"export {NEW}={ON}")
    [finding] = found(job, "ENV001")
    assert f"setup sets {NEW}={ON}, and {flag} registers" in finding.message
    assert "(here not given, which counts as older)" in finding.message
    assert finding.hint.endswith("if it runs torch 2.11 or newer, say so: cluster.torch")
    assert finding.where.line > 0


# -- ENV002 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [CUDA, NEW])
@pytest.mark.parametrize("value", ["true", "1", "TRUE", "on", ""])
def test_values_that_pytorch_rejects(plan: Any, found: Any, name: str, value: str) -> None:
    text = f"max_split_size_mb:512,expandable_segments:{value}"
    for args in ({}, UB):
        assert ids(found(plan(args, env={name: text}), "ENV002")) == ["ENV002"]


@pytest.mark.parametrize("name", [CUDA, NEW])
@pytest.mark.parametrize(
    "value, fires",
    [
        ("expandable_segments:true,expandable_segments:True", True),
        ("expandable_segments:True,expandable_segments:true", True),
        ("expandable_segments:False,expandable_segments:True", False),
        ("expandable_ segments:Tr ue", False),
        ("expandable_segments : tr ue", True),
        ("expandable_segments:\tTrue", False),
    ],
)
def test_pytorch_parses_every_item_without_blanks(
    plan: Any, found: Any, name: str, value: str, fires: bool
) -> None:
    assert ids(found(plan(env={name: value}), "ENV002")) == ["ENV002"] * fires
    if not fires:
        assert found(plan(env={name: value}), "ENV005") == []  # it is on


def test_rejected_value_message(plan: Any, found: Any) -> None:
    [finding] = found(plan(env={CUDA: "expandable_segments:false"}), "ENV")
    assert finding.message == (
        "expandable_segments:false in env: PyTorch reads True or False, nothing else"
    )
    assert finding.hint == "write expandable_segments:False"


@pytest.mark.parametrize("value", ["True", "False"])
def test_values_that_pytorch_reads(plan: Any, found: Any, value: str) -> None:
    assert found(plan(env={CUDA: f"expandable_segments:{value}"}), "ENV002") == []


def test_a_bad_value_that_is_replaced_does_not_count(plan: Any, found: Any) -> None:
    assert found(plan(env={CUDA: ON, NEW: "expandable_segments:1"}), "ENV002") == []


# -- ENV003 ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "torch, env, fires",
    [
        ("2.9", {NEW: ON}, True),
        ("2.10", {NEW: ON}, False),
        (None, {NEW: ON}, False),
        (None, {NEW: ON, CUDA: ON}, True),
        ("2.11", {NEW: ON, CUDA: ""}, True),
        ("2.9", {CUDA: ON}, False),
    ],
)
def test_new_name(plan: Any, found: Any, torch: str, env: dict[str, str], fires: bool) -> None:
    job = plan(env=env, cluster={"torch": torch} if torch else {})
    assert [f.level for f in found(job, "ENV003")] == ["warning"] * fires


def test_new_name_says_what_was_merged(plan: Any, found: Any) -> None:
    job = plan(env={NEW: "max_split_size_mb:512"}, cluster={"torch": "2.9"})
    [finding] = found(job, "ENV003")
    assert finding.message == (
        "PYTORCH_ALLOC_CONF=max_split_size_mb:512 in env: torch 2.9 reads PYTORCH_CUDA_ALLOC_CONF "
        "only; the options were merged into "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:512"
    )


# -- ENV004 ------------------------------------------------------------------------------------

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
TP = {"num-layers": 4, "tensor-model-parallel-size": 2}
CP = {"num-layers": 4, "context-parallel-size": 2}


@pytest.mark.parametrize(
    "args, gpu, value, fires",
    [
        (TP, "H100-80GB", "32", True),
        (CP, "A100-80GB", "8", True),
        (TP, "H200-141GB", "", True),
        (TP, "H100-80GB", "1", False),
        (TP, "B200-192GB", "32", False),
        (TP, "GB300-288GB", "1", False),
        (TP, "Z100-1GB", "32", False),
        (TP, None, "32", False),
        ({"num-layers": 4}, "H100-80GB", "32", False),
        ({**TP, "overlap-moe-expert-parallel-comm": True}, "H100-80GB", "32", False),
        ({**TP, "use-megatron-fsdp": True}, "H100-80GB", "32", False),
        ({**TP, "use-megatron-fsdp": True}, "H100-80GB", "1", True),
        ({"num-layers": 4, "use-torch-fsdp2": True}, None, "1", True),
        ({"num-layers": 4, "use-torch-fsdp2": True}, "B200-192GB", "1", True),
    ],
)
def test_connections(
    plan: Any, found: Any, args: dict[str, Any], gpu: str | None, value: str, fires: bool
) -> None:
    job = plan(args, env={CONNECTIONS: value}, cluster={"gpu": gpu} if gpu else {})
    assert ids(found(job, "ENV004")) == ["ENV004"] * fires


def test_connections_under_bridge(plan: Any, found: Any) -> None:
    """Bridge asserts the FSDP half only."""
    job = {"framework": "megatron-bridge", "cluster": {"gpu": "H100-80GB"}}
    assert found(plan(TP, env={CONNECTIONS: "32"}, **job), "ENV004") == []
    fsdp = {**TP, "ddp.use_megatron_fsdp": True}
    [finding] = found(plan(fsdp, env={CONNECTIONS: "1"}, **job), "ENV004")
    assert finding.message == (
        "CUDA_DEVICE_MAX_CONNECTIONS=1 in env: ddp.use_megatron_fsdp needs more than 1"
    )


def test_without_an_own_setting_the_block_is_right(plan: Any, found: Any) -> None:
    for args in (TP, CP, {**TP, "use-megatron-fsdp": True}):
        assert found(plan(args, cluster={"gpu": "H100-80GB"}), "ENV") == []


# -- ENV005 ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env, fires",
    [
        ({CUDA: "max_split_size_mb:512"}, True),
        ({CUDA: "expandable_segments:False"}, True),
        ({CUDA: ""}, True),
        ({NEW: "expandable_segments:False"}, True),
        ({NEW: "max_split_size_mb:512"}, False),  # merged with what the block sets
        ({CUDA: ON}, False),
        ({}, False),
    ],
)
def test_expandable_segments_off(plan: Any, found: Any, env: dict[str, str], fires: bool) -> None:
    findings = found(plan(env=env), "ENV005")
    assert [f.level for f in findings] == ["info"] * fires
    for finding in findings:
        name, _, value = finding.hint.partition("=")
        assert found(plan(env={name: value}), "ENV") == []


def test_expandable_segments_off_is_right_with_user_buffers_and_engines(
    plan: Any, found: Any
) -> None:
    env = {CUDA: "max_split_size_mb:512"}
    assert found(plan(UB, env=env), "ENV") == []
    assert found(plan(env=env, facts={"colocated": {"engine": "vllm"}}), "ENV") == []


# -- ENV006 ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, fires",
    [
        ("export NCCL_ALGO=$SITE", True),
        ("export NCCL_ALGO=`cat algo`", True),
        ("NCCL_ALGO=${SITE:-Ring}; export NCCL_ALGO", True),
        ("export NCCL_ALGO=Ring", False),
        ("export NCCL_ALGO='$SITE'", False),
        ("export NCCL_ALGO=$SITE; unset NCCL_ALGO", False),
        ("export NCCL_DEBUG=$SITE", False),  # not in the table: stays as it is
        ("NCCL_ALGO=$SITE", False),
    ],
)
def test_a_setup_export_that_is_replaced(plan: Any, found: Any, line: str, fires: bool) -> None:
    assert [f.level for f in found(plan(setup=[line]), "ENV006")] == ["warning"] * fires
    assert found(plan(setup=[line], env={"NCCL_ALGO": "Ring"}), "ENV006") == []


def test_replaced_export_message(plan: Any, found: Any) -> None:
    [finding] = found(plan(setup=["true", f"export {CUDA}=$X"]), "ENV006")
    assert finding.option == f"env.{CUDA}" and finding.where.line > 0
    assert finding.message.startswith(
        f"setup exports {CUDA} with a value that the shell computes; mtlaunch's block comes after "
        f"it and sets {ON} ("
    )
    assert finding.hint == (f"write the value itself, in setup or under env: env: {{{CUDA}: ...}}")
