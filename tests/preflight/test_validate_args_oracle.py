"""Random Megatron-LM command lines, judged by the rules and by Megatron-LM's own start-up.

Each job is written as a job file. Megatron gets the command line that mtlaunch would type and the
environment that the block would export, and runs what comes before a model is built: parse_args,
validate_args, the configs, the layers of each stage, the process groups, the batch calculator.
The verdicts must be the same on every job, and a refusal must come from a rule about its cause.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import logging
import os
import random
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from mtlaunch.preflight import environment
from mtlaunch.preflight.gpus import find_gpu
from mtlaunch.preflight.plan import Plan
from mtlaunch.preflight.rule import run_rules

pytestmark = [pytest.mark.train, pytest.mark.filterwarnings("ignore")]

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.training", reason="not in megatron-core's wheel (0.16.1)")
core = pytest.importorskip("megatron.core")

JOBS = int(os.environ.get("MTLAUNCH_ORACLE_JOBS", "280"))  # of all families together
SEED = int(os.environ.get("MTLAUNCH_SEED", "1"))

BASE: dict[str, Any] = {
    "num-layers": 8,
    "hidden-size": 64,
    "num-attention-heads": 4,
    "seq-length": 128,
    "max-position-embeddings": 128,
    "position-embedding-type": "rope",
    "no-rope-fusion": True,
    "micro-batch-size": 1,
    "train-iters": 10,
    "lr": 0.0001,
    "tokenizer-type": "NullTokenizer",
    "vocab-size": 1000,
    "mock-data": True,
}


@dataclass
class Case:
    """A job: arguments, own settings by layer, machine."""

    args: dict[str, Any]
    nodes: int = 1
    gpus: int = 8
    gpu: str | None = "H100-80GB"
    torch: str | None = "2.10.0"  # as the job file says it
    runs_torch: str | None = None  # what the ranks have; None: the same
    env: dict[str, str] = field(default_factory=dict)
    setup: dict[str, str] = field(default_factory=dict)
    site: dict[str, str] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.nodes * self.gpus

    def own(self, rng: random.Random, name: str, values: list[str | None]) -> None:
        """The user's own value in some place of the job file, at times under a stronger one."""
        value = rng.choice(values)
        if value is None:
            return
        layers = [self.site, self.setup, self.env]
        layer = rng.randrange(3)
        layers[layer][name] = value
        weaker = rng.choice(values)
        if layer and weaker is not None and rng.random() < 0.15:
            layers[layer - 1][name] = weaker


# -- generators, one a family ------------------------------------------------------------------

PP = "pipeline-model-parallel-size"
EACH = "num-layers-per-virtual-pipeline-stage"
VIRTUAL = "num-virtual-stages-per-pipeline-rank"
LAYOUT = "pipeline-model-parallel-layout"
FIRST = "decoder-first-pipeline-num-layers"
LAST = "decoder-last-pipeline-num-layers"
FOR_EMBEDDING = "account-for-embedding-in-pipeline-split"
FOR_LOSS = "account-for-loss-in-pipeline-split"


def layout_text(rng: random.Random, num_layers: int, stages: int, mtp: int) -> str:
    """A layout that is right, or one that one edit made wrong as a rule."""
    cuts = sorted(rng.choices(range(num_layers + 1), k=stages - 1))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, num_layers], strict=True)]
    text = "E" + "|".join("t" * size for size in sizes) + "m" * mtp + "L"
    if rng.random() < 0.5:
        text = re.sub(r"(t)\1{2,}", lambda run: f"t*{len(run[0])}", text)
    at = rng.randrange(len(text))
    edit = rng.randrange(8)
    if edit == 0:
        text = text[:at] + text[at + 1 :]
    elif edit == 1:
        text = text[:at] + rng.choice("EtmL|,x") + text[at:]
    elif edit == 2:
        text = text[:at] + rng.choice("EtmL|") + text[at + 1 :]
    elif edit == 3 and mtp:
        text = text.replace("m", "")
        at = rng.randrange(1, len(text))
        text = text[:at] + "m" * mtp + text[at:]
    return text


def pipeline(rng: random.Random) -> Case:
    pp = rng.choice([1, 2, 2, 3, 4, 4, 5, 8])
    virtual = rng.choice([1, 1, 2, 2, 3])
    unit = pp * virtual
    args: dict[str, Any] = {PP: pp}
    layers = unit * rng.randint(1, 4) if rng.random() < 0.75 else rng.randint(1, 32)
    ways = {rng.choice(["even", "even", "uneven", "account", "layout"])}
    if rng.random() < 0.1:
        ways.add(rng.choice(["uneven", "account", "layout"]))
    if "account" in ways:
        counted = rng.choice([[FOR_EMBEDDING], [FOR_LOSS], [FOR_EMBEDDING, FOR_LOSS]])
        args |= dict.fromkeys(counted, True)
        layers = max(1, layers - (len(counted) if rng.random() < 0.8 else 0))
    if "uneven" in ways:
        ends = {end: virtual * rng.randint(1, 3) for end in (FIRST, LAST)}
        if rng.random() < 0.4:
            del ends[rng.choice([FIRST, LAST])]
        middle = pp - len(ends)
        if middle >= 0 and rng.random() < 0.85:
            layers = sum(ends.values()) + middle * virtual * rng.randint(1, 3)
        if rng.random() < 0.1:
            ends[rng.choice(list(ends))] = rng.choice([0, -1, 1, 5])
        args |= ends
    if "layout" in ways:
        mtp = rng.choice([0, 0, 1, 2])
        args |= {"mtp-num-layers": mtp} if mtp else {}
        args[LAYOUT] = layout_text(rng, layers, pp * virtual, mtp)
    elif virtual > 1:
        if rng.random() < (0.15 if "uneven" in ways else 0.5):
            args[EACH] = max(1, layers // unit) if rng.random() < 0.8 else rng.randint(1, 4)
        else:
            args[VIRTUAL] = virtual
    if rng.random() < 0.05:
        args[rng.choice([EACH, VIRTUAL])] = rng.choice([1, 2])
    if rng.random() < 0.08:
        args["no-overlap-p2p-communication"] = True
    args["num-layers"] = layers
    args["global-batch-size"] = pp * rng.choice([1, 2, 4])
    if rng.random() < 0.08:
        args["global-batch-size"] = rng.randint(1, 2 * pp)
    return Case(args, gpus=pp)


def offload(rng: random.Random) -> Case:
    pp = rng.choice([1, 2, 2, 4])
    args: dict[str, Any] = {PP: pp, "bf16": True}
    kind = rng.choice([*["layers"] * 4, "optimizer", "fine-grained"])
    if kind == "layers":
        args["cpu-offloading-num-layers"] = rng.choice([0, 1, 2, 2, 4, 7, 7, 7, 8])
    if kind == "optimizer" or rng.random() < 0.15:
        args |= {"optimizer-cpu-offload": True, "use-distributed-optimizer": True}
        if rng.random() < 0.9:
            args["use-precision-aware-optimizer"] = True
    case = Case(args, gpus=rng.choice([pp, 8]))
    if kind == "fine-grained" or rng.random() < 0.05:
        args["fine-grained-activation-offloading"] = True
        args["offload-modules"] = rng.choice([["core_attn"], ["core_attn", "attn_proj"]])
    if rng.random() < 0.1:
        args["recompute-activations"] = True
    if pp > 1 and rng.random() < 0.3:
        args |= {VIRTUAL: 2, "global-batch-size": 16 * pp}
    return case


ALLOCATOR: list[str | None] = [
    None,
    None,
    "expandable_segments:True",
    "max_split_size_mb:512,expandable_segments:True",
    "max_split_size_mb:512, expandable_segments:True",
    "expandable_segments:False",
    "max_split_size_mb:512",
    "",
]


def own_allocator(case: Case, rng: random.Random) -> None:
    case.own(rng, "PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR)
    if rng.random() < 0.25:
        case.own(rng, "PYTORCH_ALLOC_CONF", ALLOCATOR)
    if rng.random() < 0.04:
        wrong = rng.choice(["true", "1", ""])
        case.own(rng, "PYTORCH_CUDA_ALLOC_CONF", [f"expandable_segments:{wrong}"])


def graphs(rng: random.Random) -> Case:
    impl = rng.choice(["none", "local", "full_iteration", *["transformer_engine"] * 5])
    flags: list[dict[str, Any]] = [{"cuda-graph-impl": impl}] * 3
    flags += [{"external-cuda-graph": True}] * 2 + [{"enable-cuda-graph": True}]
    args = dict(rng.choice(flags))
    if impl == "full_iteration" and rng.random() < 0.9:
        args["no-check-for-nan-in-loss-and-grad"] = True
    elif rng.random() < 0.2:
        args["cuda-graph-modules"] = rng.choice([["attn"], ["attn", "mlp"]])
    case = Case(args, gpu=rng.choice(["A100-80GB", "H100-80GB", "B200-192GB"]))
    own_allocator(case, rng)
    case.own(rng, "NCCL_GRAPH_REGISTER", [None, "0", "1", "1", "1", "1", "2", ""])
    if rng.random() < 0.05:
        args["cpu-offloading-num-layers"] = 2
    return case


def connections(rng: random.Random) -> Case:
    tp, cp = rng.choice([1, 2, 2, 4]), rng.choice([1, 1, 2])
    args: dict[str, Any] = {"tensor-model-parallel-size": tp, "context-parallel-size": cp}
    kind = rng.choice(["plain", "plain", "megatron fsdp", "torch fsdp", "experts"])
    if kind == "megatron fsdp":
        args |= {"use-megatron-fsdp": True, "ckpt-format": "fsdp_dtensor"}
        args |= {"no-gradient-accumulation-fusion": True, "use-distributed-optimizer": True}
    elif kind == "torch fsdp":
        args |= {"use-torch-fsdp2": True, "untie-embeddings-and-output-weights": True}
        args |= {"no-gradient-accumulation-fusion": True, "ckpt-format": "torch_dist"}
        args[PP] = rng.choice([1, 1, 1, 1, 2])
    elif kind == "experts":
        args |= {"num-experts": 8, "expert-model-parallel-size": 2, "bf16": True}
        args |= {"moe-token-dispatcher-type": "alltoall", "sequence-parallel": True}
        args["expert-tensor-parallel-size"] = 1
        args["overlap-moe-expert-parallel-comm"] = rng.random() < 0.8
    case = Case(args, gpus=8, nodes=rng.choice([1, 2]))
    case.gpu = rng.choice(["A100-80GB", "H100-80GB", "H100-80GB", "B200-192GB"])
    wrong: list[str | None] = ["1", "1", "1"] if "fsdp" in kind else ["8", "32", ""]
    case.own(rng, "CUDA_DEVICE_MAX_CONNECTIONS", [None, "1", "8", *wrong])
    if not (case.env or case.setup or case.site) and rng.random() < 0.3:
        case.gpu = None  # then the block still has to pass everywhere
    return case


def user_buffers(rng: random.Random) -> Case:
    args: dict[str, Any] = {"use-distributed-optimizer": True, "use-nccl-ub": rng.random() < 0.9}
    if rng.random() < 0.3:
        args |= {"use-megatron-fsdp": True, "ckpt-format": "fsdp_dtensor"}
        args |= {"no-gradient-accumulation-fusion": True}
    case = Case(args, torch=rng.choice(["2.6.0", "2.9.1", "2.10.0", "2.10.1", "2.11.0"]))
    own_allocator(case, rng)
    if rng.random() < 0.5:
        case.own(rng, "PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR[2:4])
    if rng.random() < 0.1:
        case.runs_torch, case.torch = case.torch, None
    return case


def batch(rng: random.Random) -> Case:
    dp, mbs = rng.choice([1, 2, 3, 4]), rng.choice([1, 1, 2, 3])
    args: dict[str, Any] = {"micro-batch-size": mbs}
    case = Case(args, gpus=dp)
    if rng.random() < 0.5:
        pp = rng.choice([2, 2, 4])
        args |= {"num-layers": 2 * pp, PP: pp, VIRTUAL: 2}
        case.gpus *= pp
        if rng.random() < 0.4:
            group = rng.choice([pp, pp, pp + 1, 2 * pp, 1])
            args["microbatch-group-size-per-virtual-pipeline-stage"] = group
    if rng.random() < 0.9:
        args["global-batch-size"] = mbs * dp * rng.randint(1, 12)
        if rng.random() < 0.3:
            args["global-batch-size"] = rng.randint(1, 30)
    special = rng.randrange(8)
    if special == 0:
        args["decrease-batch-size-if-needed"] = True
    elif special == 1:
        args["rampup-batch-size"] = [mbs * dp, mbs * dp, 100]
    elif special == 2 and VIRTUAL not in args:  # the rules do not follow a schedule
        args.pop("global-batch-size", None)
        first, second = (mbs * dp * rng.randint(1, 6) for _ in range(2))
        args["step-batch-size-schedule"] = f"0:{first} 1000:{second}"
    return case


def world(rng: random.Random) -> Case:
    args: dict[str, Any] = {
        "tensor-model-parallel-size": rng.choice([1, 1, 2, 2, 3, 4, 8]),
        PP: rng.choice([1, 1, 2, 3, 4]),
        "context-parallel-size": rng.choice([1, 1, 2]),
        "num-attention-heads": rng.choice([4, 8, 8, 8, 12]),
        "hidden-size": 192,
        "num-layers": 12,
    }
    if rng.random() < 0.4:
        args |= {"group-query-attention": True, "num-query-groups": rng.choice([1, 2, 2, 4])}
    if rng.random() < 0.3:
        args |= {"num-experts": 8, "expert-model-parallel-size": rng.choice([1, 2, 4])}
        args["disable-bias-linear"] = True
        args["sequence-parallel"] = True
        if rng.random() < 0.6:
            args["expert-tensor-parallel-size"] = rng.choice([1, 1, 2])
    return Case(args, nodes=rng.choice([1, 1, 2, 3]), gpus=rng.choice([4, 6, 8, 8]))


FAMILIES: dict[str, Callable[[random.Random], Case]] = {
    make.__name__: make
    for make in (pipeline, offload, graphs, connections, user_buffers, batch, world)
}


# -- what Megatron says, and which rules say it ------------------------------------------------

# Megatron's words -> rules, one of which must have reported the job. Megatron stops at its first
# reason; of several faults in the cut of the layers the rules report one too, maybe another.
CAUSES: dict[str, tuple[str, ...]] = {
    r"world size .* is not divisible by total_model_size": ("PAR001",),
    r"is not divisible by expert_tensor_model_pipeline_parallel size": ("PAR002",),
    r"num_attention_heads .* must be a multiple of tensor_model": ("PAR003",),
    r"num_query_groups .* must be a multiple or divisor of": ("PAR004",),
    r"[Nn]umber of layers .*divisible .*pipeline.model.parallel size$": ("PIP001",),
    r"num_layers: \d+ after enable.*must be divisible ?by pipeline_model": ("PIP001",),
    r"num_layers=\d+ should be divisible by config.pipeline_model_parallel_size": ("PIP001",),
    r"number of layers per pipeline stage must be divisible": ("PIP002", "PIP005"),
    r"num_layers_per_pipeline_rank \d+ should be divisible by vp_size": ("PIP002", "PIP003"),
    r"number of layers on each pipeline rank: .* must be divisible ?by ?virtual": ("PIP002",),
    r"number of middle layers: \d+ must be divisible by": ("PIP001",),
    r"number of layers at (first|last) stage: .*virtual": ("PIP003", "PIP004"),
    r"number of layers on each middle pipeline rank": ("PIP003",),
    r"number of layers at middle stage: .*the middle pipeline model parallel": ("PIP004",),
    r"Mismatch: .* middle layers remaining": ("PIP004",),
    r"num_layers_in_(first|last)_pipeline_stage must be larger than 0": ("PIP004",),
    r"^builds -?\d+ layers of": ("PIP001", "PIP004"),
    r"interleaved schedule is used, pipeline-model-parallel size should be greater than 1": (
        *("PIP004", "PIP005", "PIP010", "PIP011", "PIP013", "PIP014", "PIP015"),
    ),
    r"interleaved schedule is used and p2p communication overlap is disabled": (
        *("PIP004", "PIP005", "PIP013", "PIP014", "PIP015", "PIP017"),
    ),
    r"No more than one of the following arguments can be set": ("PIP006",),
    r"please use --num-virtual-stages-per-pipeline-rank": ("PIP007",),
    r"pipeline_stage cannot be ?set at the same time with account_for": ("PIP008",),
    r"pipeline_model_parallel_layout cannot be set with other": ("PIP009",),
    r"Invalid layer character": ("PIP010",),
    r"length of pipeline_model_parallel_layout must be divisible": ("PIP011",),
    r"(Embedding|Loss) must be specified exactly once": ("PIP013",),
    r"The (first|last) layer must be (embedding|loss)": ("PIP013",),
    r"Number of (decoder|mtp) layers .*must match": ("PIP014",),
    r"decoder layers must be placed before MTP layers": ("PIP015",),
    r"the MTP should (be always in the last|not be in the first)": ("PIP015",),
    r"All of the MTP layers must be in the same one virtual": ("PIP015",),
    r"The number of contiguous micro-batches in a virtual": ("PIP016",),
    r"The remainder of M \(the total micro-batches\)": ("PIP016",),
    r"eval_global_batch_size .* must be divisible by": ("DAT001",),
    r"number of microbatches should be at least 1": ("DAT001",),
    r"no support for Pipeline parallelism with CPU offloading": ("OFF001",),
    r"Setting NCCL_GRAPH_REGISTER=0": ("GRF001",),
    r"currently not supported with nccl_ub": ("ENV001",),
    r"in ConfigTokenizer but got|AllocatorConfig.h": ("ENV002",),
    r"FSDP (always )?requires CUDA_DEVICE_MAX_CONNECTIONS": ("ENV004",),
    r"require setting the environment variable CUDA_DEVICE_MAX_CONNECTIONS to 1": ("ENV004",),
}

# Rules about mixed ways of cutting the layers: the other pipeline rules stand back for them.
MIXED = {"PIP006", "PIP007", "PIP008", "PIP009"}

# Refusals that the generators reach beside what they are there for, and no rule is about yet:
# mtlaunch may take such a job.
NO_RULE_YET = (
    r"CPU offloading can be done only for layers less than",
    r"CPU offloading does not work when activation recomputation",
    r"fine_grained_activation_offloading cannot be enabled with cpu_offloading",
    r"CUDA graphs not supported with CPU offloading",
    r"optimizer cpu offload must be used in conjunction with .--use-precision-aware",
    r"--no-check-for-nan-in-loss-and-grad should be set with --cuda-graph-impl=full_iteration",
    r"--use-torch-fsdp2 is not supported with pipeline parallelism",
)


def both_ends(case: Case, plan: Plan) -> bool:
    """One stage, and sizes of a first and a last one: Megatron takes the last one's for all."""
    return plan.pp == 1 and FIRST in case.args and LAST in case.args


def torch_unknown(case: Case, plan: Plan) -> bool:
    """Torch is not given: counts as old for user buffers, where a wrong guess costs a queue."""
    return plan.torch is None and plan.nccl_ub and environment.expandable_segments_on(plan)


def blank_in_list(case: Case, plan: Plan) -> bool:
    """Megatron's guard of user buffers compares items with their blanks; PyTorch strips them."""
    return plan.nccl_ub and ", expandable" in (environment.allocator_value(plan) or "")


# Jobs that Megatron starts and mtlaunch refuses, on purpose: the rule, which jobs, an example.
STRICTER: list[tuple[str, Callable[[Case, Plan], bool], Case]] = [
    ("PIP004", both_ends, Case({FIRST: 3, LAST: 8}, gpus=1)),
    (
        "ENV001",
        torch_unknown,
        Case(
            {"use-nccl-ub": True},
            torch=None,
            runs_torch="2.11.0",
            env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        ),
    ),
    (
        "ENV001",
        blank_in_list,
        Case(
            {"use-nccl-ub": True},
            env={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512, expandable_segments:True"},
        ),
    ),
]


class Answers:
    """Megatron-LM's start-up up to the model, on this CPU; '' or the words of its refusal."""

    def __init__(self, built_layers: Any, parallel_state: Any, guard: Any, refused: Any) -> None:
        from megatron.training import arguments

        # building the parser is most of parse_args
        parser = argparse.ArgumentParser(allow_abbrev=False)
        self.parser = arguments.add_megatron_arguments(parser)
        self.built_layers = built_layers
        self.parallel_state = parallel_state
        self.guard = guard
        self.refused = refused

    def __call__(self, case: Case, plan: Plan, capability: tuple[int, int]) -> str:
        printed = io.StringIO()
        with (
            restored_process(),
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            self.stub(patch, case, capability)
            for variable in environment.block(plan):
                os.environ.pop(variable.name, None)
                if variable.value is not None:
                    os.environ[variable.name] = variable.value
            os.environ |= {"WORLD_SIZE": str(case.world), "RANK": "0"}
            patch.setattr(sys, "argv", ["pretrain_gpt.py", *plan.command_args])
            try:
                self.start(case)
            except SystemExit:
                return printed.getvalue().strip().splitlines()[-1]
            except (AssertionError, ValueError, RuntimeError, self.refused) as error:
                return " ".join(str(error).split()) or type(error).__name__
        return ""

    def stub(self, patch: pytest.MonkeyPatch, case: Case, capability: tuple[int, int]) -> None:
        """A GPU, a Transformer Engine and a torch of the job's kind, where Megatron asks."""
        from megatron.core import optimizer, utils
        from megatron.core.optimizer import optimizer_config
        from megatron.core.transformer import transformer_config
        from megatron.training import arguments
        from packaging.version import Version

        patch.setattr(arguments, "add_megatron_arguments", lambda parser: self.parser)
        patch.setattr(arguments, "get_device_arch_version", lambda: capability[0])
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        for module in (arguments, transformer_config, optimizer_config, optimizer, utils):
            if hasattr(module, "is_te_min_version"):
                newest = functools.partial(self.te_min_version, Version("2.12.0"))
                patch.setattr(module, "is_te_min_version", newest)
        version = case.runs_torch or case.torch or torch.__version__
        patch.setattr(utils, "get_torch_version", lambda: Version(version))

    @staticmethod
    def te_min_version(have: Any, version: str, check_equality: bool = True) -> bool:
        from packaging.version import Version

        return bool(have >= Version(version) if check_equality else have > Version(version))

    def start(self, case: Case) -> None:
        from megatron.core import num_microbatches_calculator as batches
        from megatron.training import arguments, training
        from megatron.training.argument_utils import core_transformer_config_from_args

        # validate_args changes lists in place, the parser's defaults among them
        args = copy.deepcopy(arguments.parse_args())
        arguments.validate_args(args)
        steps = batches._build_num_microbatches_calculator(  # as set_global_variables does
            rank=0,
            global_batch_size=args.global_batch_size,
            micro_batch_size=args.micro_batch_size,
            data_parallel_size=args.data_parallel_size,
            decrease_batch_size_if_needed=args.decrease_batch_size_if_needed,
            step_batch_size_schedule=args.step_batch_size_schedule,
            seq_length=args.seq_length,
        )
        virtual = args.virtual_pipeline_model_parallel_size
        self.parallel_state(
            case.world,
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        )
        config = core_transformer_config_from_args(args)
        self.built_layers(config)
        training.get_megatron_ddp_config(args)
        read_allocator_settings()
        if virtual is not None:
            group = config.microbatch_group_size_per_vp_stage
            self.guard(args.pipeline_model_parallel_size, steps.get(), group)


def read_allocator_settings() -> None:
    """What PyTorch does with the allocator setting when it first touches a GPU."""
    read = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if read is None:
        return
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        read(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    finally:
        read(before)


@contextlib.contextmanager
def restored_process() -> Iterator[None]:
    """validate_args may change the environment and torch's own switches."""
    environ, deterministic = dict(os.environ), torch.are_deterministic_algorithms_enabled()
    logged = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        torch.use_deterministic_algorithms(deterministic)
        logging.disable(logged)


@pytest.fixture
def megatron(
    built_layers: Any, initialize_parallel_state: Any, interleaving_guard: Any, refused: Any
) -> Answers:
    return Answers(built_layers, initialize_parallel_state, interleaving_guard, refused)


def plan_of(make_plan: Callable[..., Plan], case: Case) -> Plan:
    cluster = {"megatron_core": core.__version__, "torch": case.torch, "gpu": case.gpu}
    given: dict[str, Any] = {key: value for key, value in cluster.items() if value is not None}
    return make_plan(
        {**BASE, **case.args},
        nodes=case.nodes,
        gpus=case.gpus,
        env=case.env,
        setup=[f"export {name}={shlex.quote(value)}" for name, value in case.setup.items()],
        cluster={**given, "env": case.site},
    )


def errors_of(job: Plan) -> dict[str, str]:
    """Messages of the errors by rule; the estimate of the memory has its own oracles."""
    found = run_rules(job, ignore=("MEM",))
    return {finding.id: finding.message for finding in found if finding.level == "error"}


def capability_of(case: Case, rng: random.Random) -> tuple[int, int]:
    gpu = find_gpu(case.gpu) if case.gpu else None
    return gpu.compute_capability if gpu else rng.choice([(8, 0), (9, 0), (10, 0)])


def disagreement(case: Case, job: Plan, errors: dict[str, str], reason: str) -> str:
    """What is wrong with the two verdicts, '' where they agree or may differ."""
    if not reason:
        allowed = {id for id, covers, _ in STRICTER if covers(case, job)}
        return "refused by mtlaunch alone" if set(errors) - allowed else ""
    if any(re.search(words, reason) for words in NO_RULE_YET):
        return ""
    rules = next((rules for words, rules in CAUSES.items() if re.search(words, reason)), None)
    if rules is None:
        return "Megatron's reason is in neither list"
    accepted = {*rules, *MIXED} if rules[0].startswith("PIP") else {*rules}
    return "" if accepted & set(errors) else "not refused, or for another cause"


@pytest.mark.parametrize("family", FAMILIES)
def test_family_agrees_with_validate_args(plan: Any, megatron: Answers, family: str) -> None:
    rng = random.Random(f"{SEED} {family}")
    count = max(1, JOBS // len(FAMILIES))
    wrong: list[str] = []
    seen = Counter[str]()
    for _ in range(count):
        case = FAMILIES[family](rng)
        job = plan_of(plan, case)
        errors = errors_of(job)
        reason = megatron(case, job, capability_of(case, rng))
        fault = disagreement(case, job, errors, reason)
        if fault:
            ours = errors or "taken"
            wrong.append(f"{fault}: {case}\n  mtlaunch: {ours}\n  Megatron: {reason or 'taken'}")
        if errors:
            seen["refused by both" if reason else "stricter"] += 1
        else:
            seen["no rule yet" if reason else "taken by both"] += 1
    print(f"{family}: {count} jobs, {dict(seen)}")
    assert not wrong, f"seed {SEED}: {len(wrong)} of {count}\n" + "\n".join(wrong[:20])
    assert min(seen["refused by both"], seen["taken by both"]) >= count / 5, seen


@pytest.mark.parametrize("entry", STRICTER, ids=lambda entry: entry[1].__name__)
def test_stricter_rules_are_really_stricter(plan: Any, megatron: Answers, entry: Any) -> None:
    """Each exception is a job that Megatron starts; otherwise it would hide a disagreement."""
    rule, covers, case = entry
    job = plan_of(plan, case)
    assert covers(case, job)
    assert set(errors_of(job)) == {rule}
    assert megatron(case, job, (9, 0)) == ""


def test_the_block_answers_for_the_user(plan: Any, megatron: Answers) -> None:
    """TP 2 on Hopper passes because the block sets one connection, and on Blackwell without."""
    args = {"tensor-model-parallel-size": 2}
    for gpu, capability, value in (("H100", (9, 0), "1"), ("B200", (10, 0), "32")):
        case = Case(args, gpu=gpu)
        job = plan_of(plan, case)
        block = {variable.name: variable.value for variable in environment.block(job)}
        assert block["CUDA_DEVICE_MAX_CONNECTIONS"] == value
        assert megatron(case, job, capability) == ""
    # the same block where it is not meant for: Megatron does look at it
    assert "CUDA_DEVICE_MAX_CONNECTIONS to 1" in megatron(case, job, (9, 0))
