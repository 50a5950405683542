"""JobFile to Plan: Megatron's own defaulting, once."""

from __future__ import annotations

from typing import Any

import pytest

from mtlaunch.preflight import jobfile, resolve
from mtlaunch.preflight.yaml_text import JobFileError

BRIDGE = {"framework": "megatron-bridge"}


def problems(text: str) -> list[str]:
    with pytest.raises(JobFileError) as caught:
        resolve.resolve(jobfile.parse(text, "job.yaml"))
    return [problem.message for problem in caught.value.problems]


def test_all_problems_at_once() -> None:
    found = problems(
        "args: {num-layers: many, hidden-size: 0, bf16: maybe}\nmodel: lama3-8b\n"
        "cluster: {gpu: H100-80GB}\n"
    )
    assert len(found) == 6
    assert "how many GPUs a node? slurm has none" in found
    assert "what to run? there is no entrypoint" in found
    assert "unknown model 'lama3-8b'" in found


@pytest.mark.parametrize(
    "slurm, nodes, gpus",
    [
        ({"gpus_per_node": 8}, 1, 8),
        ({"nodes": 2, "gpus-per-node": "h100:4"}, 2, 4),
        ({"nodes": "2-4", "gpus_per_node": 8}, 2, 8),
        ({"gres": "gpu:h100:8,nvme:1"}, 1, 8),
        ({"gres": "gpu:2"}, 1, 2),
        ({"nodes": 2, "gpus": 16}, 2, 8),
        ({"ntasks_per_node": 4, "gpus-per-task": 1}, 1, 4),
    ],
)
def test_gpus(plan: Any, slurm: dict[str, Any], nodes: int, gpus: int) -> None:
    made = plan(slurm=slurm)
    assert (made.nodes, made.gpus_per_node, made.world_size) == (nodes, gpus, nodes * gpus)


def test_ranks_without_a_gpu(plan: Any) -> None:
    made = plan(slurm={"nodes": 2, "ntasks_per_node": 3})
    assert (made.gpus_per_node, made.world_size) == (None, 6)


# -- virtual stages ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more, vpp, option",
    [
        ({}, None, None),
        ({"num-virtual-stages-per-pipeline-rank": 4}, 4, "num-virtual-stages-per-pipeline-rank"),
        ({"virtual_pipeline_model_parallel_size": 4}, 4, "num-virtual-stages-per-pipeline-rank"),
        ({"num-virtual-stages-per-pipeline-rank": 1}, None, "num-virtual-stages-per-pipeline-rank"),
        ({"num-layers-per-virtual-pipeline-stage": 2}, 2, "num-layers-per-virtual-pipeline-stage"),
        (
            {"num-layers-per-virtual-pipeline-stage": 4},
            None,
            "num-layers-per-virtual-pipeline-stage",
        ),
        (
            {"pipeline-model-parallel-layout": "Ettt|ttt|ttt|ttt|t|t|t|tL"},
            2,
            "pipeline-model-parallel-layout",
        ),
    ],
)
def test_virtual_stages(plan: Any, more: dict[str, Any], vpp: int | None, option: str) -> None:
    made = plan({"num-layers": 16, "pipeline-model-parallel-size": 4, **more})
    assert (made.vpp, made.vpp_option) == (vpp, option)


# -- defaults ----------------------------------------------------------------------------------


def test_expert_tensor_parallel(plan: Any) -> None:
    args = {"num-layers": 4, "tensor-model-parallel-size": 4, "expert-model-parallel-size": 2}
    assert plan(args).etp == 4
    assert plan(args, **BRIDGE).etp == 1
    assert plan({**args, "expert-model-parallel-size": 1}, **BRIDGE).etp == 4
    assert plan({**args, "expert-tensor-parallel-size": 2}, **BRIDGE).etp == 2


def test_cpu_offloading(plan: Any) -> None:
    args = {"num-layers": 4, "cpu-offloading-num-layers": 2}
    assert plan(args).cpu_offloading
    assert not plan(args, **BRIDGE).cpu_offloading
    assert plan({"model.cpu_offloading": True}).cpu_offloading


def test_sequence_parallel_needs_tp(plan: Any) -> None:
    assert not plan({"sequence-parallel": True}).sequence_parallel
    assert plan({"sequence-parallel": True, "tensor-model-parallel-size": 2}).sequence_parallel


def test_shapes(plan: Any) -> None:
    made = plan(model="llama3-8b", args={"tensor-model-parallel-size": 2, "num-layers": 2})
    assert (made.num_layers, made.hidden_size, made.num_query_groups) == (2, 4096, 8)
    assert made.padded_vocab_size == 128256
    made = plan({"hidden-size": 4096, "num-attention-heads": 32, "swiglu": True})
    assert (made.kv_channels, made.ffn_hidden_size) == (128, 10880)
    assert plan({"hidden-size": 1024}).ffn_hidden_size == 4096


def test_query_groups_need_their_flag(plan: Any) -> None:
    args = {"num-attention-heads": 32, "num-query-groups": 8}
    assert plan(args).num_query_groups == 32
    assert plan({**args, "group-query-attention": True}).num_query_groups == 8
    assert plan(args, **BRIDGE).num_query_groups == 8


def test_framework(plan: Any) -> None:
    assert plan({"num-layers": 4}).framework == "megatron-lm"
    assert plan({"model.num_layers": 4}).framework == "megatron-bridge"
    assert plan(entrypoint={"module": "megatron.bridge.recipes.run"}).is_bridge


def test_numbers_as_typed_reach_the_script(plan: Any) -> None:
    text = (
        "slurm: {gpus_per_node: 1}\nentrypoint: pretrain_gpt.py\n"
        "args: {lr: 1.0e-4, seed: 012, split: '969,30,1', bf16: true, fp16: no, x: [1, 02]}\n"
    )
    made = resolve.resolve(jobfile.parse(text))
    assert " ".join(made.command_args) == (
        "--lr 1.0e-4 --seed 012 --split 969,30,1 --bf16 --x 1 02"
    )


# -- places and spellings ----------------------------------------------------------------------


def test_places_of_variables_are_the_strongest_layers() -> None:
    text = (
        "slurm: {gpus_per_node: 1}\n"
        "entrypoint: train.py\n"
        "cluster: {env: {A: site, B: site, C: site}}\n"
        "setup:\n"
        "  - export A=setup B=setup\n"
        "env: {A: job}\n"
    )
    made = resolve.resolve(jobfile.parse(text))
    assert [made.place(f"env.{name}").line for name in "ABC"] == [6, 5, 3]


def test_spellings(plan: Any) -> None:
    made = plan({"ddp.nccl_ub": True, "num_layers": 4}, **BRIDGE)
    assert made.spelling("use-nccl-ub") == "ddp.nccl_ub"
    assert made.spelling("num-layers") == "num_layers"
    assert made.spelling("decoder-first-pipeline-num-layers") == (
        "num_layers_in_first_pipeline_stage"
    )
    made = plan({"num_layers": 4})
    assert made.spelling("num-layers") == "--num-layers"
    assert made.spelling("use-nccl-ub") == "--use-nccl-ub"


@pytest.mark.parametrize(
    "lines, found",
    [
        (["export A=1"], {"A": "1"}),
        (["module load cuda && export A='x y' B=2; C=3"], {"A": "x y", "B": "2"}),
        (["export A=$HOME", "export B=`id`"], {}),
        (["echo export A=1"], {}),
        (["export A"], {}),
        (["unclosed 'quote"], {}),
        (["export A=1", "export A=2"], {"A": "2"}),
    ],
)
def test_exports(lines: list[str], found: dict[str, str]) -> None:
    assert resolve.exports_of(lines) == found
