"""Names of options: what the checks read of a Bridge config, what each framework is given."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mtlaunch.preflight import flags, jobfile, resolve
from mtlaunch.preflight.plan import Plan
from mtlaunch.preflight.yaml_text import JobFileError

BRIDGE = {"framework": "megatron-bridge"}
HEAD = "slurm: {gpus_per_node: 8}\nentrypoint: run.py\n"


# -- one option, or two ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args, read",
    [
        ({"rng.seed": 1, "dataset.seed": 1}, {"seed": 1}),
        (
            {"ddp.overlap_grad_reduce": True, "comm_overlap.overlap_grad_reduce": True},
            {"overlap-grad-reduce": True},
        ),
        (
            {"mixed_precision.grad_reduce_in_fp32": 1, "ddp.grad_reduce_in_fp32": 2},
            {"grad-reduce-in-fp32": 2},
        ),
        ({"model.vision_config.num_layers": 24, "model.num_layers": 4}, {"num-layers": 4}),
        ({"model.vision_config.num_layers": 24}, {}),
        ({"my.num_layers": 24}, {}),
        ({"dataset.seq_length": 1, "model.seq_length": 2}, {"seq-length": 2}),
        ({"optimizer.x": 1, "comm_overlap.x": 2, "train.x": 3}, {"x": 1}),
        # whichever section switches a feature on
        ({"ddp.nccl_ub": False, "comm_overlap.nccl_ub": True}, {"use-nccl-ub": True}),
        ({"comm_overlap.nccl_ub": False, "ddp.nccl_ub": True}, {"use-nccl-ub": True}),
    ],
)
def test_different_paths_are_different_options(
    plan: Any, args: dict[str, Any], read: dict[str, Any]
) -> None:
    made = plan(args, **BRIDGE)
    assert made.args == read
    assert len(made.command_args) == len(args)


@pytest.mark.parametrize(
    "one, two",
    [
        ("model.num_layers", "num-layers"),
        ("ddp.nccl_ub", "use-nccl-ub"),
        ("model.add_bias_linear", "disable-bias-linear"),
        ("model.num_moe_experts", "model.num-experts"),
    ],
)
def test_one_path_in_two_spellings(one: str, two: str) -> None:
    text = f"{HEAD}framework: megatron-bridge\nargs: {{{one}: true, {two}: true}}\n"
    with pytest.raises(JobFileError) as caught:
        resolve.resolve(jobfile.parse(text))
    [problem] = [p for p in caught.value.problems if "same option" in p.message]
    assert problem.message == f"args.{two} is the same option as args.{one}"
    assert problem.place.line == 4


# -- nested arguments --------------------------------------------------------------------------


NESTED = (
    "args:\n"
    "  model: {cpu_offloading: true, pipeline_model_parallel_size: 2, num_layers: 8}\n"
    "  ddp:\n"
    "    nccl_ub: true\n"
    "  optimizer: {lr: 1.0e-4}\n"
    "  model.vision_config: {num_layers: 24}\n"
)


def test_nested_arguments_are_read_and_rendered_as_paths(found: Any) -> None:
    made = resolve.resolve(jobfile.parse(HEAD + NESTED))
    assert made.is_bridge and made.cpu_offloading and made.nccl_ub
    assert (made.pp, made.num_layers) == (2, 8)
    assert made.command_args == (
        "model.cpu_offloading=true",
        "model.pipeline_model_parallel_size=2",
        "model.num_layers=8",
        "ddp.nccl_ub=true",
        "optimizer.lr=1.0e-4",
        "model.vision_config.num_layers=24",
    )
    assert (made.place("use-nccl-ub").line, made.place("use-nccl-ub").column) == (6, 5)
    assert made.spelling("use-nccl-ub") == "ddp.nccl_ub"
    assert [finding.id for finding in found(made, "OFF")] == ["OFF001"]


@pytest.mark.parametrize("more", ["ddp.nccl_ub: false", "nccl-ub: false", "+ddp.nccl_ub: false"])
def test_nested_and_dotted(more: str) -> None:
    with pytest.raises(JobFileError) as caught:
        resolve.resolve(jobfile.parse(f"{HEAD}{NESTED}  {more}\n"))
    [problem] = caught.value.problems
    key = more.partition(":")[0]
    where = " on line 6" if key == "ddp.nccl_ub" else ""
    assert problem.message == f"args.{key} is the same option as args.ddp.nccl_ub{where}"
    assert problem.place.line == 9


def test_set_replaces_a_nested_value() -> None:
    made = resolve.resolve(jobfile.parse(HEAD + NESTED, "job", ["args.ddp.nccl_ub=false"]))
    assert not made.nccl_ub
    assert [one for one in made.command_args if "nccl_ub" in one] == ["ddp.nccl_ub=false"]


def test_a_mapping_for_a_script_of_its_own_stays_one_value(plan: Any) -> None:
    assert plan({"json": {"a": 1}}).command_args == ("--json", '{"a": 1}')


# -- what is rendered --------------------------------------------------------------------------


def test_megatron_lm_gets_flags_that_it_has(plan: Any) -> None:
    args = {
        "virtual_pipeline_model_parallel_size": 5,
        "nccl-ub": True,
        "num_moe_experts": 8,
        "my_own_flag": "x",
    }
    made = plan(args)
    assert " ".join(made.command_args) == (
        "--num-virtual-stages-per-pipeline-rank 5 --use-nccl-ub --num-experts 8 --my-own-flag x"
    )
    assert made.spelling("use-nccl-ub") == "--use-nccl-ub"


@pytest.mark.parametrize("name", ["cpu-offloading", "use-cpu-offloading"])
def test_megatron_lm_offloads_by_a_number(plan: Any, name: str) -> None:
    made = plan({name: True, "cpu-offloading-num-layers": 2})
    assert made.cpu_offloading
    assert made.command_args == ("--cpu-offloading-num-layers", "2")


@pytest.mark.parametrize(
    "key, value, rendered",
    [
        ("tensor-model-parallel-size", 2, "model.tensor_model_parallel_size=2"),
        ("virtual_pipeline_model_parallel_size", 2, "model.virtual_pipeline_model_parallel_size=2"),
        ("num-virtual-stages-per-pipeline-rank", 2, "model.virtual_pipeline_model_parallel_size=2"),
        ("use-nccl-ub", True, "ddp.nccl_ub=true"),
        ("nccl_ub", False, "ddp.nccl_ub=false"),
        ("disable-bias-linear", True, "model.add_bias_linear=false"),
        ("no-gradient-accumulation-fusion", False, "model.gradient_accumulation_fusion=true"),
        ("disable-bias-linear", None, "model.add_bias_linear=null"),
        ("optimizer", "adam", "optimizer.optimizer=adam"),
        ("micro_batch_size", 1, "train.micro_batch_size=1"),
        ("fp8-format", "hybrid", "model.fp8=hybrid"),
        ("+model.num-layers", 4, "+model.num_layers=4"),
        ("my_field", 1, "my_field=1"),
        ("model.vision_config.num-layers", 1, "model.vision_config.num-layers=1"),
        ("comm_overlap.nccl_ub", True, "comm_overlap.nccl_ub=true"),
    ],
)
def test_megatron_bridge_gets_paths(plan: Any, key: str, value: Any, rendered: str) -> None:
    assert plan({key: value}, **BRIDGE).command_args == (rendered,)


def test_a_reversed_flag_keeps_its_sense_for_the_checks(plan: Any) -> None:
    assert not plan({"disable-bias-linear": True}, **BRIDGE).bias_linear
    assert not plan({"model.add_bias_linear": False}, **BRIDGE).bias_linear
    assert plan({"model.add_bias_linear": True}, **BRIDGE).bias_linear


# Recommended by rules and by the estimate's fixes.
RECOMMENDED = """use-distributed-optimizer attention-backend transformer-impl recompute-granularity
recompute-modules recompute-method recompute-num-layers micro-batch-size global-batch-size
pipeline-model-parallel-size tensor-model-parallel-size expert-model-parallel-size
expert-tensor-parallel-size sequence-parallel optimizer-cpu-offload use-precision-aware-optimizer
fine-grained-activation-offloading num-virtual-stages-per-pipeline-rank num-layers mtp-num-layers
decoder-first-pipeline-num-layers microbatch-group-size-per-virtual-pipeline-stage""".split()


@pytest.mark.parametrize("option", RECOMMENDED)
def test_bridge_has_what_hints_recommend(option: str) -> None:
    shown = Plan(framework="megatron-bridge").spelling(option)
    assert shown in flags.SECTION_OF
    assert flags.bridge_path(shown) == (f"{flags.SECTION_OF[shown]}.{shown}", False)


def test_the_sections_own_their_fields() -> None:
    """Against megatron-core's dataclasses, which Bridge's sections extend."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    # Megatron-Bridge src/megatron/bridge/models/gpt_provider.py
    provider = {"seq_length", "vocab_size", "make_vocab_size_divisible_by"}
    provider |= {"share_embeddings_and_output_weights", "position_embedding_type"}
    classes: dict[str, Any] = {
        "model": MLATransformerConfig,
        "ddp": DistributedDataParallelConfig,
        "optimizer": OptimizerConfig,
    }
    for section, cls in classes.items():
        known = {one.name for one in dataclasses.fields(cls)}
        known |= provider if section == "model" else set()
        ours = {name for name, owner in flags.SECTION_OF.items() if owner == section}
        assert ours <= known, section
