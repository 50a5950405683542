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
        ({"nodes": 2, "gpus_per_task": 1, "ntasks": 16}, 2, 8),
        ({"gres": "gpu:a100:4,gpu:h100:4"}, 1, 8),
        ({"gres": "gres:gpu:a100:4(S:0-1),nvme:1"}, 1, 4),
        ({"gpus_per_node": "a100:4,h100:4"}, 1, 8),
        ({"gpus_per_node": 8, "gres": "gpu:8"}, 1, 8),
        # how many nodes is said by two totals
        ({"gpus": 16, "gpus_per_node": 8}, 2, 8),
        ({"gpus_per_task": 1, "ntasks": 16, "ntasks_per_node": 8}, 2, 8),
    ],
)
def test_gpus(plan: Any, slurm: dict[str, Any], nodes: int, gpus: int) -> None:
    made = plan(slurm=slurm)
    assert (made.nodes, made.gpus_per_node, made.world_size) == (nodes, gpus, nodes * gpus)


@pytest.mark.parametrize(
    "slurm, option, message, hint",
    [
        (
            {"gpus": 7, "nodes": 2},
            "gpus",
            "slurm.gpus: 7 GPUs do not divide by 2 nodes",
            "gpus: 6 or 8, or gpus_per_node",
        ),
        (
            {"gpus": 1, "nodes": 2},
            "gpus",
            "slurm.gpus: 1 GPUs do not divide by 2 nodes",
            "gpus: 2, or gpus_per_node",
        ),
        (
            {"ntasks": 5, "nodes": 2},
            "ntasks",
            "slurm.ntasks: 5 tasks do not divide by 2 nodes",
            "ntasks: 4 or 6, or ntasks_per_node",
        ),
        (
            {"gpus": 8, "nodes": 2, "gpus_per_node": 8},
            "gpus",
            "slurm.gpus: 8, but 2 nodes with 8 GPUs each make 16",
            "leave gpus out: nodes and gpus_per_node say it",
        ),
        (
            {"gpus_per_node": 8, "nodes": 2, "ntasks_per_node": 8, "ntasks": 8},
            "ntasks",
            "slurm.ntasks: 8, but 2 nodes with 8 tasks each make 16",
            "leave ntasks out: nodes and ntasks_per_node say it",
        ),
        (
            {"gpus_per_node": 8, "gres": "gpu:4"},
            "gres",
            "slurm.gres: 4 GPUs a node, but the other options ask for 8",
            "keep one of them: gpus_per_node is enough",
        ),
        (
            {"gpus_per_node": 8, "gpus_per_task": 8},
            "gpus_per_task",
            "slurm.gpus-per-task: 8 tasks a node with 8 each use 64 GPUs, but a node has 8",
            "gpus_per_task: 1, launcher srun runs one task a GPU; or launcher: torchrun; or leave "
            "it out",
        ),
    ],
)
def test_sizes_that_do_not_add_up(
    slurm: dict[str, Any], option: str, message: str, hint: str
) -> None:
    lines = ["entrypoint: a.py", "slurm:", *(f"  {key}: {value}" for key, value in slurm.items())]
    with pytest.raises(JobFileError) as caught:
        resolve.resolve(jobfile.parse("\n".join(lines)))
    [problem] = caught.value.problems
    assert (problem.message, problem.hint) == (message, hint)
    assert lines[problem.place.line - 1].strip().startswith(f"{option}:")


def test_torchrun_takes_all_gpus_in_one_task(plan: Any) -> None:
    slurm = {"nodes": 2, "ntasks": 2, "gpus_per_task": 8}
    made = plan(slurm=slurm, launcher="torchrun")
    assert (made.nodes, made.gpus_per_node, made.world_size) == (2, 8, 16)


@pytest.mark.parametrize(
    "slurm, ranks",
    [
        ({"gpus_per_node": 8, "ntasks": 4, "nodes": 2}, 8),
        ({"gpus_per_task": 1, "ntasks": 16, "nodes": 2}, 8),
        ({"ntasks": 6, "nodes": 2}, 3),
    ],
)
def test_the_script_has_no_other_number_of_tasks(
    plan: Any, slurm: dict[str, Any], ranks: int
) -> None:
    from mtlaunch.launcher.render import sbatch_options

    made = plan(slurm=slurm)
    options = dict(sbatch_options(made, "/runs/r"))
    assert made.ranks_per_node == ranks
    assert "ntasks" not in options
    assert (options["nodes"], options["ntasks-per-node"]) == ("2", str(ranks))


@pytest.mark.parametrize(
    "key, message, hint",
    [
        ("arr", "slurm.arr: sbatch reads --arr as --array", "`sweep` will render arrays"),
        ("beg", "slurm.beg: sbatch reads --beg as --begin", "write begin in full"),
        ("dep", "slurm.dep: sbatch reads --dep as --dependency", "write dependency in full"),
    ],
)
def test_an_abbreviated_option(key: str, message: str, hint: str) -> None:
    text = f"entrypoint: a.py\nslurm:\n  gpus_per_node: 8\n  {key}: 3\n"
    with pytest.raises(JobFileError) as caught:
        resolve.resolve(jobfile.parse(text))
    [problem] = caught.value.problems
    assert (problem.message, problem.hint, problem.place.line) == (message, hint, 4)


def test_an_option_of_a_plugin_may_be_anything(plan: Any) -> None:
    slurm = {"gpus_per_node": 8, "spank-thing": "x"}
    assert plan(slurm=slurm).slurm["spank-thing"] == "x"


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
        (["export A=1", "A=2"], {"A": "2"}),
        # the other ways to export
        (["export A=1\nexport B=2\n"], {"A": "1", "B": "2"}),
        (["A=1; export A"], {"A": "1"}),
        (["A=1", "B=2 C=3", "export A C"], {"A": "1", "C": "3"}),
        (["export A", "A=1"], {"A": "1"}),
        (
            ["declare -x A=1", "typeset -x B=2", "declare -gx C=3", "declare D=4"],
            {"A": "1", "B": "2", "C": "3"},
        ),
        (["set -a; A=1", "B=2", "set +a; C=3"], {"A": "1", "B": "2"}),
        (["set -o allexport", "A=1"], {"A": "1"}),
        (["set -euo pipefail; A=1"], {}),
        (["export A=1 \\\n  B=2"], {"A": "1", "B": "2"}),
        (["export A=1 2>/dev/null # no"], {"A": "1"}),
        (["export A=a#b~"], {"A": "a#b~"}),
        (["command export A=1"], {"A": "1"}),
        # what may run counts
        (["if [ -d /x ]; then export A=1; else export B=2; fi"], {"A": "1", "B": "2"}),
        (["for i in 1 2; do export A=1; done"], {"A": "1"}),
        (["{ export A=1; }", "(export B=2)"], {"A": "1", "B": "2"}),
        (["test -d /x && export A=1 || export B=2"], {"A": "1", "B": "2"}),
        (["case $X in a) export A=1;; esac"], {"A": "1"}),
        # what takes an export back
        (["export A=1 B=2", "unset A"], {"B": "2"}),
        (["export A=1", "export -n A"], {}),
        (["export A=1", "export A=$HOME"], {}),
        (["export A=1", "unset -f A"], {"A": "1"}),
        # no exports
        (["A=1 python x.py"], {}),
        (["A=1"], {}),
        (["cat > x <<EOF\nexport A=1\nEOF\nexport B=2"], {"B": "2"}),
        (["echo hi > export A=1"], {}),
        (["# export A=1"], {}),
        (["export A=~/x", "export B=$(id -u 'x') C=${D:-e f} D=3"], {"D": "3"}),
        (["export -f A=1"], {}),
    ],
)
def test_exports(lines: list[str], found: dict[str, str]) -> None:
    assert resolve.exports_of(lines) == found


def test_computed_exports_are_known_by_name() -> None:
    lines = ["export A=$HOME B=1", "set -a", "C=`id`", "D=$X; unset D", "export B+=2"]
    read = resolve.read_setup(lines)
    assert read == {"A": (None, 0), "B": (None, 4), "C": (None, 2)}


def test_the_place_of_an_export_is_its_entry() -> None:
    text = (
        "slurm: {gpus_per_node: 1}\nentrypoint: train.py\nsetup:\n"
        "  - set -a\n  - A=1\n  - |\n    true\n    B=$X\n"
    )
    made = resolve.resolve(jobfile.parse(text))
    assert (made.setup_env, made.setup_unread) == ({"A": "1"}, ("B",))
    assert [made.place(f"env.{name}").line for name in "AB"] == [5, 6]


def test_a_computed_export_does_not_hide_the_place_of_the_value_that_counts() -> None:
    text = (
        "slurm: {gpus_per_node: 1}\nentrypoint: train.py\n"
        "cluster:\n  env: {NCCL_ALGO: Tree}\nsetup: [export NCCL_ALGO=$X]\n"
    )
    made = resolve.resolve(jobfile.parse(text))
    assert (made.place("env.NCCL_ALGO").line, made.place("setup.NCCL_ALGO").line) == (4, 5)


@pytest.mark.parametrize("value", ["1", "0", "'true'", "once"])
def test_a_switch_of_megatron_lm_takes_no_value(value: str) -> None:
    text = f"slurm: {{gpus_per_node: 8}}\nentrypoint: t.py\nargs:\n  bf16: {value}\n"
    with pytest.raises(JobFileError, match=r"job.yaml:4:3: args.bf16: expected true or false"):
        resolve.resolve(jobfile.parse(text))


def test_several_values_are_a_list() -> None:
    text = (
        "slurm: {gpus_per_node: 8}\nentrypoint: t.py\nargs:\n  recompute-granularity: selective\n"
        "  recompute-modules: core_attn mlp\n"
    )
    with pytest.raises(JobFileError) as raised:
        resolve.resolve(jobfile.parse(text))
    [problem] = raised.value.problems
    assert (problem.place.line, problem.hint) == (5, "write a list: [core_attn, mlp]")


def test_what_a_model_shape_brings_points_at_the_model() -> None:
    text = "slurm: {gpus_per_node: 8}\nentrypoint: t.py\nmodel: llama3-8b\n"
    assert resolve.resolve(jobfile.parse(text)).place("num-layers").line == 3


EVERYTHING_WRONG = """\
name: a b
slurm: {nodes: 0, gpus_per_node: 8}
cluster: prod
entrypoint: train.py
entrypoint: other.py
modle: llama3-8b
args:
  num-layers: eighty
  num_layers: 3
lora: {dim: 0}
"""


def test_problems_of_all_readings_come_at_once() -> None:
    with pytest.raises(JobFileError) as raised:
        resolve.load(EVERYTHING_WRONG, "job.yaml")
    problems = raised.value.problems
    found = [(problem.place.line, problem.message.split(":")[0]) for problem in problems]
    assert found == [
        (1, "name"),
        (2, "slurm.nodes"),
        (3, "cluster profile 'prod'"),
        (5, "duplicate key 'entrypoint' (first on line 4)"),
        (6, "unknown key 'modle'"),
        (8, "num-layers"),
        (9, "args.num_layers is the same option as args.num-layers"),
        (10, "lora.dim"),
    ]


def test_a_misspelt_key_is_not_also_a_missing_one() -> None:
    text = "slrum: {gpus_per_node: 8}\nentrypiont: train.py\nargs: {num-layers: x}\n"
    with pytest.raises(JobFileError) as raised:
        resolve.load(text, "job.yaml")
    assert [problem.place.line for problem in raised.value.problems] == [1, 2, 3]


def test_what_is_missing_beside_other_problems_is_said_too() -> None:
    with pytest.raises(JobFileError) as raised:
        resolve.load("workdri: .\n", "job.yaml")
    words = [problem.message for problem in raised.value.problems]
    assert len(words) == 3 and any("what to run" in word for word in words)


def test_a_line_break_in_a_variable_is_refused_with_its_place() -> None:
    text = 'slurm: {gpus_per_node: 8}\nentrypoint: t.py\nenv:\n  A: "x\\ny"\n'
    with pytest.raises(JobFileError, match=r"job.yaml:4:3: env.A: a line break"):
        resolve.load(text, "job.yaml")


@pytest.mark.parametrize(
    "file, name", [("été.yaml", "t"), ("a b.yaml", "a-b"), ("x" * 120 + ".yaml", "x" * 100)]
)
def test_a_name_from_the_file_is_one_that_a_job_file_may_have(file: str, name: str) -> None:
    text = "slurm: {gpus_per_node: 8}\nentrypoint: t.py\n"
    job, _ = resolve.load(text, file)
    assert job.name == name
    resolve.load(f"name: {name}\n{text}", "job.yaml")
