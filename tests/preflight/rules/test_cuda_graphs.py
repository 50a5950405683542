"""GRF: CUDA graphs on expandable segments."""

from __future__ import annotations

from typing import Any

import pytest

TE, LOCAL, FULL = "transformer_engine", "local", "full_iteration"
OFF = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}


def graphs(impl: str, **more: Any) -> dict[str, Any]:
    return {"num-layers": 4, "cuda-graph-impl": impl, **more}


@pytest.mark.parametrize(
    "impl, gpu, core, level",
    [
        (TE, "H100-80GB", "0.19", "error"),
        (TE, "B200-192GB", "0.19", "error"),
        (TE, "B200-192GB", "0.16.1", "error"),
        (TE, None, "0.19", "error"),
        (LOCAL, "H100-80GB", "0.16", "error"),
        (LOCAL, "A100-80GB", "0.18.2", "error"),
        (LOCAL, "H100-80GB", "0.19", "warning"),
        (LOCAL, "H100-80GB", None, "warning"),
        (LOCAL, "B200-192GB", "0.16.1", "warning"),
        (LOCAL, None, "0.16.1", "warning"),  # which half of the guard applies is not known
        (LOCAL, "X9-1GB", "0.16.1", "warning"),
        (FULL, "H100-80GB", "0.19", "warning"),
    ],
)
@pytest.mark.parametrize("value", ["1", ""])
def test_register(
    plan: Any, found: Any, impl: str, gpu: str | None, core: str | None, level: str, value: str
) -> None:
    cluster = {k: v for k, v in {"gpu": gpu, "megatron_core": core}.items() if v}
    job = plan(graphs(impl), env={"NCCL_GRAPH_REGISTER": value}, cluster=cluster)
    [finding] = found(job, "GRF")
    assert (finding.id, finding.level) == ("GRF001", level)
    assert finding.option == "env.NCCL_GRAPH_REGISTER"


def test_full_iteration_scope_of_016_has_no_guard(plan: Any, found: Any) -> None:
    cluster = {"gpu": "H100-80GB", "megatron_core": "0.16.1"}
    env = {"NCCL_GRAPH_REGISTER": "1"}
    for scope in ("full_iteration", ["full_iteration"]):
        args = graphs(LOCAL, **{"cuda-graph-scope": scope})
        assert [f.level for f in found(plan(args, env=env, cluster=cluster), "GRF")] == ["warning"]
    args = graphs(LOCAL, **{"cuda-graph-scope": "attn"})
    assert [f.level for f in found(plan(args, env=env, cluster=cluster), "GRF")] == ["error"]


@pytest.mark.parametrize(
    "args, env",
    [
        (graphs(TE), {}),
        (graphs(TE), {"NCCL_GRAPH_REGISTER": "0"}),
        (graphs(TE), {"NCCL_GRAPH_REGISTER": "1", **OFF}),
        (graphs("none"), {"NCCL_GRAPH_REGISTER": "1"}),
        ({"num-layers": 4}, {"NCCL_GRAPH_REGISTER": "1"}),
        (graphs(TE, **{"use-nccl-ub": True}), {"NCCL_GRAPH_REGISTER": "1"}),
    ],
)
def test_silent(plan: Any, found: Any, args: dict[str, Any], env: dict[str, str]) -> None:
    assert found(plan(args, env=env), "GRF") == []


@pytest.mark.parametrize("flag, impl", [("enable-cuda-graph", LOCAL), ("external-cuda-graph", TE)])
def test_old_flags(plan: Any, found: Any, flag: str, impl: str) -> None:
    job = plan(
        {"num-layers": 4, flag: True},
        env={"NCCL_GRAPH_REGISTER": "1"},
        cluster={"gpu": "H100-80GB", "megatron_core": "0.16"},
    )
    assert job.cuda_graph_impl == impl
    assert [f.level for f in found(job, "GRF")] == ["error"]


@pytest.mark.parametrize("framework", ["megatron-lm", "megatron-bridge"])
def test_an_old_flag_beside_an_impl_of_none(plan: Any, found: Any, framework: str) -> None:
    """transformer_config.py of megatron-core 0.16.1: local graphs; other impls assert."""
    args = graphs("none", **{"enable-cuda-graph": True})
    job = plan(
        args,
        env={"NCCL_GRAPH_REGISTER": "1"},
        cluster={"gpu": "H100-80GB", "megatron_core": "0.16"},
        framework=framework,
    )
    [finding] = found(job, "GRF")
    assert (job.cuda_graph_impl, finding.level) == (LOCAL, "error")
    typed = "--enable-cuda-graph" if framework == "megatron-lm" else "enable-cuda-graph=true"
    assert f" with {typed} and " in finding.message


def test_old_flag_in_a_section(plan: Any, found: Any) -> None:
    job = plan({"model.external_cuda_graph": True}, env={"NCCL_GRAPH_REGISTER": "1"})
    [finding] = found(job, "GRF")
    assert " with model.external_cuda_graph=true and " in finding.message


@pytest.mark.parametrize(
    "core, gpu, guards",
    [
        ("0.18", None, "cluster.gpu is not given"),
        ("0.16.1", "X9-1GB", "cluster.gpu 'X9-1GB' is not known"),
        ("0.19", None, None),
        ("0.16.1", "B200-192GB", None),
    ],
)
def test_an_unknown_gpu_may_be_guarded(
    plan: Any, found: Any, core: str, gpu: str | None, guards: str | None
) -> None:
    cluster = {"megatron_core": core} | ({"gpu": gpu} if gpu else {})
    [finding] = found(plan(graphs(LOCAL), env={"NCCL_GRAPH_REGISTER": "1"}, cluster=cluster), "GRF")
    assert finding.level == "warning"
    assert ("does not guard here" in finding.message) is (guards is None)
    assert (guards or "") in finding.message


def test_other_layers(plan: Any, found: Any) -> None:
    for job in (
        {"setup": "export NCCL_GRAPH_REGISTER=1"},
        {"cluster": {"env": {"NCCL_GRAPH_REGISTER": "1"}}},
    ):
        assert [f.id for f in found(plan(graphs(TE), **job), "GRF")] == ["GRF001"]


def test_message(plan: Any, found: Any) -> None:
    env = {"NCCL_GRAPH_REGISTER": "1"}
    [finding] = found(plan(graphs(TE), env=env), "GRF")
    assert finding.message == (
        "NCCL_GRAPH_REGISTER=1 in env with --cuda-graph-impl transformer_engine and expandable "
        "segments on: Megatron refuses any value but 0 on every GPU"
    )
    assert finding.hint == "set NCCL_GRAPH_REGISTER=0, or leave it out: mtlaunch sets it"
    cluster = {"gpu": "H100-80GB", "megatron_core": "0.18"}
    [finding] = found(plan(graphs(LOCAL), env=env, cluster=cluster), "GRF")
    assert finding.message.endswith(
        "Megatron refuses any value but 0 on H100-80GB with megatron-core 0.18"
    )
